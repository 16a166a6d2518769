"""`GET /`: a page to talk to the model, in one document that loads nothing else.

Its style and script stand in the document, and the content security policy allows them by their hashes. The page holds
no data of the server: it asks for everything with the key that its user enters.
"""

from __future__ import annotations

import functools
from importlib import resources

from fastapi import Request
from starlette.responses import HTMLResponse, Response

from llmstack_server.options.config import HTTPConfig
from llmstack_server.web.errors import HTTPError, missing_api_key
from llmstack_server.web.routes import Content, Key, Needs, Router, RouteSpec, route_path
from llmstack_types.html_page import HtmlPage, html_page

_SCRIPTS = (
    "elements.js", "inline.js", "markdown.js", "drawing.js", "chats.js", "conversation.js", "stream.js", "requests.js",
    "tokens.js", "files.js", "messages.js", "sidebar.js", "settings.js", "load.js", "speech.js", "script.js",
)  # fmt: skip


CHAT_PATH, LIVE_PATH = "/", "/live"
PAGES_PLACE = "<!-- pages -->"
"""Where a document has the links to the other pages."""


def add_chat_page(router: Router, http: HTTPConfig) -> None:
    """Adds the page, which needs no key."""

    @router.declare(RouteSpec(
        "GET HEAD", CHAT_PATH, Content.TEXT, is_documented=False, needs=Needs.NOTHING, key=Key.ASKED_BY_PAGE
    ))  # fmt: skip
    async def chat_page(request: Request) -> Response:
        """A document without data: its calls need the key."""
        return page_response(request, _chat_page(), http)


def pages_of(http: HTTPConfig) -> list[tuple[str, str]]:
    """Names and paths of the pages for people that this server has."""
    chat = [("Chat", CHAT_PATH), *([("Live", LIVE_PATH)] if http.has_live_page else [])] if http.has_chat_page else []
    return [*chat, *([("API", "/docs")] if http.has_docs else []), ("Metrics", "/metrics")]


def page_links(http: HTTPConfig, path: str) -> str:
    """The links of the page at `path` to the others, as HTML.

    Addresses are relative, which stay valid under any prefix of a proxy. A link sends no key: on a server with keys
    only pages that ask for one are linked.
    """
    needs_header = bool(http.api_keys)
    links = []
    for name, target in pages_of(http):
        if target == path:
            links.append(f'<span aria-current="page">{name}</span>')
        elif not needs_header or target in (CHAT_PATH, LIVE_PATH) or (target == "/metrics" and http.has_open_metrics):
            links.append(f'<a href="{target[1:] or "./"}">{name}</a>')
    return f'<nav class="pages" aria-label="Pages of this server">{" ".join(links)}</nav>'


def page_response(request: Request, page: HtmlPage, http: HTTPConfig) -> Response:
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
        "permissions-policy": "microphone=(self)",
        "x-content-type-options": "nosniff",
    }
    text = page.text.replace(PAGES_PLACE, page_links(http, route_path(request.scope)), 1)
    return HTMLResponse(text, status_code=401 if needs_key else 200, headers=headers)


@functools.cache
def _chat_page() -> HtmlPage:
    scripts = "".join(_read(name) for name in _SCRIPTS)
    return html_page(_read("page.html"), _read("style.css"), scripts, has_files=True, has_worklet=True)


def _read(name: str) -> str:
    return (resources.files("llmstack_server.app") / "assets" / "chat" / name).read_text(encoding="utf-8")
