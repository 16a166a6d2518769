"""The page that draws a timeline: one document that loads nothing else."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources

from llmstack_types.html_page import HtmlPage, html_page

_SCRIPTS = ("steps.js", "drawing.js", "panels.js", "figures.js", "script.js")


def timeline_page(timeline: Mapping[str, object] | None = None) -> HtmlPage:
    """The page, which follows its server live; with a timeline it needs no server."""
    return _live_page() if timeline is None else _page(json.dumps(timeline, ensure_ascii=False))


@functools.cache
def _live_page() -> HtmlPage:
    return _page("null")


def _page(timeline: str) -> HtmlPage:
    page, style = _read("page.html"), _read("style.css")
    script = "\n".join(_read(name) for name in _SCRIPTS)
    # In HTML, `<` in a string could end the element that holds it; `/*` could be taken for the place of the script.
    page = page.replace("null", timeline.replace("<", "\\u003c").replace("/*", "\\u002f*"), 1)
    return html_page(page, style, script, has_server=timeline == "null")


def _read(name: str) -> str:
    return (resources.files("llmstack_insight.timeline") / "assets" / name).read_text(encoding="utf-8")
