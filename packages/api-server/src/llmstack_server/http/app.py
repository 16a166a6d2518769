"""Builds the ASGI application of one server."""

from __future__ import annotations

from typing import NoReturn

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from llmstack_server.http.errors import HTTPError, method_not_supported, unknown_url
from llmstack_server.http.middleware import AuthenticationMiddleware, GateMiddleware, RequestContextMiddleware
from llmstack_server.http.routes import build_router
from llmstack_server.state import ServerState
from llmstack_server.version import server_version


def build_app(state: ServerState) -> FastAPI:
    """The application: middleware around routes. Starts nothing; `state` decides what is answered."""
    # No `/docs` yet: FastAPI's page loads its assets from a CDN.
    app = FastAPI(title="llmstack", version=server_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(build_router(state))
    app.add_exception_handler(HTTPException, _translate)
    # The last one added is the outermost.
    app.add_middleware(GateMiddleware, state=state)
    app.add_middleware(AuthenticationMiddleware, state=state)
    if state.config.http.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.config.http.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestContextMiddleware, state=state)
    return app


async def _translate(request: Request, error: Exception) -> NoReturn:
    """Starlette's own errors in our shape; the middleware renders them."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    if status == 404:
        raise HTTPError(unknown_url(request.method, request.url.path))
    if status == 405:
        raise HTTPError(method_not_supported(request.method, (headers or {}).get("Allow", "")))
    raise RuntimeError("an unexpected HTTP error") from error
