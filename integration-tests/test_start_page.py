"""The page of starts that fail has the sentences that the code says now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_has_the_sentences_of_the_code() -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_start_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_start_that_would_succeed_stops_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import make_start_page

    with pytest.raises(AssertionError, match="says"):
        make_start_page.serve("--port", "0")(tmp_path)
    with pytest.raises(AssertionError, match="is found"):
        make_start_page.find(str(make_start_page.model_path()))(tmp_path)
