"""`GET /docs`: Swagger UI over `/openapi.json`, with assets from this package."""

from __future__ import annotations

import functools
import gzip
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

_MEDIA_TYPES = {"swagger-ui-bundle.js": "text/javascript; charset=utf-8", "swagger-ui.css": "text/css; charset=utf-8"}
# Relative URLs, which stay valid under any prefix of a proxy.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>llmstack</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#page", validatorUrl: null})</script>
</body>
</html>
"""


def add_docs_routes(router: APIRouter) -> None:
    """Adds the page, its script and its style sheet."""

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(_PAGE)

    @router.get("/docs/swagger-ui-bundle.js", include_in_schema=False)
    async def script(request: Request) -> Response:
        return _asset("swagger-ui-bundle.js", request)

    @router.get("/docs/swagger-ui.css", include_in_schema=False)
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
