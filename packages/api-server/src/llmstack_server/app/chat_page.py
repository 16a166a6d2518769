"""`GET /`: a page to talk to the model, in one document that loads nothing else.

Its style and script stand in the document, and the content security policy allows them by their hashes. The page holds
no data of the server: it asks for everything with the key that its user enters.
"""

from __future__ import annotations

import functools
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from llmstack_server.web.errors import HTTPError, missing_api_key
from llmstack_server.web.middleware import CHAT_PATH
from llmstack_types.html_page import HtmlPage, html_page

_SCRIPTS = ("markdown.js", "script.js")


def add_chat_page(router: APIRouter) -> None:
    """Adds the page, which needs no key."""

    @router.head(CHAT_PATH, include_in_schema=False)
    @router.get(CHAT_PATH, include_in_schema=False)
    async def chat_page(request: Request) -> Response:
        """A document without data: its calls need the key."""
        return page_response(request, _chat_page())


def page_response(request: Request, page: HtmlPage) -> Response:
    """A page for people; a browser without a key gets it with status 401, since it asks for the key.

    Raises:
        HTTPError: A key is missing, and what asks is no browser.
    """
    needs_key = bool(request.scope["state"].get("needs_key"))
    if needs_key and "text/html" not in request.headers.get("accept", ""):
        raise HTTPError(missing_api_key())
    headers = {
        "content-security-policy": page.policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return HTMLResponse(page.text, status_code=401 if needs_key else 200, headers=headers)


@functools.cache
def _chat_page() -> HtmlPage:
    return html_page(_read("page.html"), _read("style.css"), "".join(_read(name) for name in _SCRIPTS))


def _read(name: str) -> str:
    return (resources.files("llmstack_server.app") / "assets" / "chat" / name).read_text(encoding="utf-8")
