"""`GET /`: a page to talk to the model, in one document that loads nothing else.

Its style and script stand in the document, and the content security policy allows them by their hashes. The page holds
no data of the server: it asks for everything with the key that its user enters.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from llmstack_server.web.errors import HTTPError, missing_api_key
from llmstack_server.web.middleware import KEY_ASKING_PATH

_SCRIPTS = ("markdown.js", "script.js")


def add_chat_page(router: APIRouter) -> None:
    """Adds the page, which needs no key."""

    @router.head(KEY_ASKING_PATH, include_in_schema=False)
    @router.get(KEY_ASKING_PATH, include_in_schema=False)
    async def chat_page(request: Request) -> Response:
        """The page; a browser without a key gets it with status 401, since it asks for the key."""
        needs_key = bool(request.scope["state"].get("needs_key"))
        if needs_key and "text/html" not in request.headers.get("accept", ""):
            raise HTTPError(missing_api_key())
        page, policy = chat_document()
        headers = {
            "content-security-policy": policy,
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return HTMLResponse(page, status_code=401 if needs_key else 200, headers=headers)


@functools.cache
def chat_document() -> tuple[str, str]:
    """The page, and its content security policy."""
    style, script = _read("style.css"), "".join(_read(name) for name in _SCRIPTS)
    script = f'"use strict";\n{script}'
    page = _read("page.html").replace("/* style */", style).replace("/* script */", script)
    directives = (
        "default-src 'none'",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(script)}'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return page, "; ".join(directives)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (resources.files("llmstack_server.app") / "assets" / "chat" / name).read_text(encoding="utf-8")
