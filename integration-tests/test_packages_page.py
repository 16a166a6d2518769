"""The page on packages names every group of entry points that the sources read."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "packages.md"


def groups_of_the_sources() -> set[str]:
    found: set[str] = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for line in re.findall(r"^(?:[A-Z_]*GROUP(?:, )?)+ = .*$", path.read_text(encoding="utf-8"), re.MULTILINE):
            found |= set(re.findall(r'"(llmstack\.[a-z_]+)"', line))
    return found - {"llmstack.models_out_of_tree"}  # the older name of another


def test_every_group_of_entry_points_is_on_the_page() -> None:
    named = re.findall(r"^\| `(llmstack\.[a-z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(groups_of_the_sources())
    assert len(named) == 7
