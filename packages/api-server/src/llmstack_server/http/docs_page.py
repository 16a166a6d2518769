"""`GET /docs`: Swagger UI over `/openapi.json`, with assets of our own: no page asks another machine for anything."""

from __future__ import annotations

import functools
import gzip
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

_MEDIA_TYPES = {"swagger-ui-bundle.js": "text/javascript; charset=utf-8", "swagger-ui.css": "text/css; charset=utf-8"}
# Relative addresses: they hold under whatever prefix a proxy shows the server.
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
    """The page and its two assets."""

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """The page."""
        return HTMLResponse(_PAGE)

    @router.get("/docs/swagger-ui-bundle.js", include_in_schema=False)
    async def script(request: Request) -> Response:
        """Its script."""
        return _asset("swagger-ui-bundle.js", request)

    @router.get("/docs/swagger-ui.css", include_in_schema=False)
    async def style(request: Request) -> Response:
        """Its style."""
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
    return (resources.files("llmstack_server.http") / "assets" / f"{name}.gz").read_bytes()
