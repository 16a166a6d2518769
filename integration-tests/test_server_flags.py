"""The page on the server's flags says what the parser says."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools" / "make_flags_page.py"


def test_the_page_on_flags_is_current() -> None:
    written = runpy.run_path(str(TOOL))
    assert written["PAGE"].read_text(encoding="utf-8") == written["page"](), "run: python tools/make_flags_page.py"
