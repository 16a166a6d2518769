"""A page of the docs that a tool writes."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def write_page(name: str, text: str) -> int:
    """Writes the page, or with `--check` on the command line compares it; the exit code."""
    page = DOCS / name
    if "--check" not in sys.argv[1:]:
        page.write_text(text, encoding="utf-8")
        return 0
    is_current = page.is_file() and page.read_text(encoding="utf-8") == text
    print(f"{name} is {'' if is_current else 'not '}current")
    return 0 if is_current else 1
