"""The guide to a new sampling parameter names exactly the files that know of the one that it shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = re.compile(r"top_n_sigma|near_best")


def guide() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("<!-- sampling parameter: begin")[2].partition("<!-- sampling parameter: end")[0]


def test_the_files_of_the_guide_are_those_that_name_the_parameter() -> None:
    sources = (ROOT / "packages").glob("*/src/**/*.py")
    found = {path.relative_to(ROOT).as_posix() for path in sources if NAMES.search(path.read_text(encoding="utf-8"))}
    listed = re.findall(r"^\d\. `([^`]+)`", guide(), re.MULTILINE)
    assert set(listed) == found
    assert len(listed) <= 5
    assert len({path.split("/")[1] for path in listed}) <= 3
