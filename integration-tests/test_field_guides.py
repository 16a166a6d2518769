"""The guides to a sampling parameter and a control route name exactly the files that know of the one they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def listed_in(guide: str) -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    part = text.partition(f"<!-- {guide}: begin")[2].partition(f"<!-- {guide}: end")[0]
    return re.findall(r"^\d\. `([^`]+)`", part, re.MULTILINE)


@pytest.mark.parametrize(
    ("guide", "names", "max_files"),
    [
        ("sampling parameter", r"top_n_sigma|near_best", 5),
        ("control route", r"SET_LOG_LEVEL|set_log_level|log_routes", 8),
    ],
)
def test_the_files_of_a_guide_are_those_that_know_of_its_example(guide: str, names: str, max_files: int) -> None:
    sources = (ROOT / "packages").glob("*/src/**/*.py")
    known = re.compile(names)
    found = {path.relative_to(ROOT).as_posix() for path in sources if known.search(path.read_text(encoding="utf-8"))}
    listed = listed_in(guide)
    assert set(listed) == found
    assert len(listed) <= max_files
    assert len({path.split("/")[1] for path in listed}) <= 3
