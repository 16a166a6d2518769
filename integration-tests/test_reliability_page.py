"""Every row of the reliability page names a test, or a script, that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
TABLE = PAGE.partition("## Guarantees")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (?!guarantee|---)(.*?) \| (.*?) \|", TABLE, re.MULTILINE)


def files(name: str) -> list[Path]:
    """The files of the repository that a name of the page can mean."""
    if "/" in name:
        return [path for path in [ROOT / name] if path.is_file()]
    places = (ROOT / "integration-tests", *ROOT.glob("packages/*/tests"))
    return [path for place in places for path in place.rglob(name)]


@pytest.mark.parametrize(("row", "tests"), ROWS)
def test_each_row_names_what_exists(row: str, tests: str) -> None:
    names = re.findall(r"`(.*?)`", tests)
    assert names, row
    for name in names:
        file, _, function = name.partition("::")
        assert files(file), name
        assert not function or any(f"def {function}(" in path.read_text() for path in files(file)), name


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 10
