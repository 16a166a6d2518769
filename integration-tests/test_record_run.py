"""`tools/record_run.py`: what it reads from pytest, what it writes, and that the page is current."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = runpy.run_path(str(ROOT / "tools" / "record_run.py"))
PAGE = f"before\n{TOOL['BEGIN']}old\n{TOOL['END']}after\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the files that the tool reads and writes."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/last_runs.json").write_text('{"test-full": ' + json.dumps(row(passed=9)) + "}")
    (tmp_path / "CONTRIBUTING.md").write_text(PAGE)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-C", str(tmp_path)]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    return tmp_path


def row(**tests: int) -> dict[str, Any]:
    return {
        "when": "2026-01-02 03:04",
        "commit": "0123abcd",
        "processor": "2 × CPU, AVX2",
        "tests": tests,
        "minutes": 9.5,
    }


def printing(text: str, exit_code: int) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({exit_code})"]


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        (["===== 12 passed, 3 skipped, 1 warning in 4.56s ====="], {"passed": 12, "skipped": 3}),
        (["2 failed, 1 passed, 1 error in 61.00s (0:01:01)"], {"failed": 2, "passed": 1, "error": 1}),
        (["= 2 passed, 7 deselected in 0.1s =", "= 3 passed, 2 errors in 1.00s ="], {"passed": 5, "error": 2}),
        (["12 units compiled in 3.5s of work", "FAILED test.py - 1 passed in 2s"], {}),
    ],
)
def test_the_last_lines_of_pytest_are_counted_together(lines: list[str], counts: dict[str, int]) -> None:
    assert TOOL["counts_of"](lines) == counts


def test_a_row_names_failures_first(repository: Path) -> None:
    assert TOOL["table"]({"test": row(passed=1234, failed=2, skipped=0)}).splitlines()[-1] == (
        "| `make test` | 2026-01-02 03:04 | 0123abcd | 2 × CPU, AVX2 | 2 failed, 1,234 passed | 9.5 |"
    )


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_run_is_recorded_with_its_commit_beside_the_others(repository: Path, exit_code: int) -> None:
    command = printing("=== 5 passed, 1 skipped in 2.00s ===", exit_code)
    assert TOOL["main"](["test", "--", *command], repository) == exit_code
    runs = json.loads((repository / "tools/last_runs.json").read_text())
    commit = subprocess.check_output(["git", "-C", str(repository), "rev-parse", "HEAD"], text=True)
    assert runs["test"]["tests"] == {"passed": 5, "skipped": 1}
    assert commit.startswith(runs["test"]["commit"])
    assert runs["test-full"] == row(passed=9)
    page = (repository / "CONTRIBUTING.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert page.count("| `make test") == 2
    assert TOOL["check"](repository) == 0


def test_nothing_is_recorded_of_changes_or_without_tests(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL["main"](["test", "--", *printing("no tests", 0)], repository) == 2
    (repository / "new").write_text("")
    assert TOOL["main"](["test", "--", *printing("1 passed in 1s", 0)], repository) == 2
    assert "uncommitted changes" in capsys.readouterr().out
    assert "test" not in json.loads((repository / "tools/last_runs.json").read_text())


def test_the_page_of_this_repository_is_written_from_its_runs() -> None:
    assert TOOL["check"](ROOT) == 0
