"""`GET /docs`: Swagger UI over `/openapi.json`, with assets from this package."""

from __future__ import annotations

import functools
import gzip
from importlib import resources

from fastapi import Request
from starlette.responses import HTMLResponse, Response

from llmstack_server.app.chat_page import PAGES_PLACE, page_links
from llmstack_server.options.config import HTTPConfig
from llmstack_server.web.routes import Content, Needs, Router, RouteSpec

_MEDIA_TYPES = {"swagger-ui-bundle.js": "text/javascript; charset=utf-8", "swagger-ui.css": "text/css; charset=utf-8"}
# Relative URLs, which stay valid under any prefix of a proxy.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llmstack</title>
<link rel="icon" href="data:,">
<meta name="color-scheme" content="light dark">
<link rel="stylesheet" href="docs/swagger-ui.css">
<style>
body { margin: 0; }
.pages { display: flex; flex-wrap: wrap; gap: 0.2rem 0.9rem; padding: 0.6rem 1rem; font: 0.9rem system-ui, sans-serif; }
.pages, .pages a { background: #f0f0ee; color: #3b4151; }
.dark-mode .pages, .dark-mode .pages a { background: #222427; color: #ececea; }
.pages [aria-current] { font-weight: 600; }
.swagger-ui .info .title small pre.version { color: #fff; }
.swagger-ui .info .title small { background: #4a5160; }
.swagger-ui .info .title small.version-stamp { background: #3f6212; }
html:not(.dark-mode) .swagger-ui .info a, html:not(.dark-mode) .swagger-ui .info .url { color: #1d4f91; }
html:not(.dark-mode) .json-schema-2020-12-expand-deep-button { color: #3b4151; }
.swagger-ui .opblock.opblock-get .opblock-summary-method { background: #1d4f91; color: #fff; }
.swagger-ui .opblock.opblock-post .opblock-summary-method { background: #1b6339; color: #fff; }
.swagger-ui .opblock.opblock-delete .opblock-summary-method { background: #a11212; color: #fff; }
</style>
</head>
<body>
<!-- pages -->
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)")
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches)
dark.addEventListener("change", paint)
paint()
SwaggerUIBundle({url: "openapi.json", dom_id: "#page", validatorUrl: null})
</script>
</body>
</html>
"""


def add_docs_routes(router: Router, http: HTTPConfig) -> None:
    """Adds the page, its script and its style sheet."""
    page = _PAGE.replace(PAGES_PLACE, page_links(http, "/docs"))

    @router.declare(RouteSpec("GET", "/docs", Content.TEXT, is_documented=False, needs=Needs.NOTHING))
    async def docs() -> Response:
        return HTMLResponse(page)

    @router.declare(RouteSpec(
        "GET", "/docs/swagger-ui-bundle.js", Content.FILE, is_documented=False, needs=Needs.NOTHING
    ))  # fmt: skip
    async def script(request: Request) -> Response:
        return _asset("swagger-ui-bundle.js", request)

    @router.declare(RouteSpec(
        "GET", "/docs/swagger-ui.css", Content.FILE, is_documented=False, needs=Needs.NOTHING
    ))  # fmt: skip
    async def style(request: Request) -> Response:
        return _asset("swagger-ui.css", request)


def _asset(name: str, request: Request) -> Response:
    headers = {"cache-control": "public, max-age=86400", "vary": "accept-encoding"}
    content = _compressed(name)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    else:
        content = gzip.decompress(content)
    return Response(content, media_type=_MEDIA_TYPES[name], headers=headers)


@functools.cache
def _compressed(name: str) -> bytes:
    return (resources.files("llmstack_server.app") / "assets" / f"{name}.gz").read_bytes()
