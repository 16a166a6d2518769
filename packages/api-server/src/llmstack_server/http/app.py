"""Builds the ASGI application of one server."""

from __future__ import annotations

from typing import NoReturn

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from llmstack_server.anthropic.errors import AnthropicErrorMiddleware
from llmstack_server.http.custom_middleware import add_custom_middleware
from llmstack_server.http.errors import HTTPError, method_not_supported, unknown_url
from llmstack_server.http.middleware import (
    AuthenticationMiddleware,
    ErrorMiddleware,
    GateMiddleware,
    RequestContextMiddleware,
)
from llmstack_server.http.rate_limit import RateLimitMiddleware
from llmstack_server.http.routes import build_router
from llmstack_server.http_options import RateLimits
from llmstack_server.state import ServerState
from llmstack_server.telemetry.middleware import ObservingMiddleware
from llmstack_server.version import server_version


def build_app(state: ServerState) -> FastAPI:
    """The application: middleware around routes. Starts nothing; `state` decides what is answered."""
    http = state.config.http
    app = FastAPI(
        title="llmstack",
        version=server_version(),
        docs_url=None,  # FastAPI's own page loads its assets from a CDN; ours is a route
        redoc_url=None,
        openapi_url="/openapi.json" if http.has_docs else None,
        redirect_slashes=False,
    )
    app.include_router(build_router(state))
    app.add_exception_handler(HTTPException, _translate)
    _add_middleware(app, state)
    return app


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """The last one added is the outermost."""
    http = state.config.http
    app.add_middleware(GateMiddleware, state=state)
    if http.rate_limits != RateLimits():
        app.add_middleware(RateLimitMiddleware, state=state)
    app.add_middleware(AuthenticationMiddleware, state=state)
    app.add_middleware(AnthropicErrorMiddleware)
    if http.middleware or http.cors.origins:
        app.add_middleware(ErrorMiddleware)  # what stands further outside sees answers, and can add its headers
    add_custom_middleware(app, http.middleware)
    if http.cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(http.cors.origins),
            allow_methods=list(http.cors.methods),
            allow_headers=list(http.cors.headers),
            allow_credentials=http.cors.allows_credentials,
            expose_headers=["x-request-id", "request-id", "retry-after", "retry-after-ms"],
        )
    if state.telemetry is not None:
        app.add_middleware(ObservingMiddleware, observers=state.telemetry.observers)
    app.add_middleware(RequestContextMiddleware, state=state)


async def _translate(request: Request, error: Exception) -> NoReturn:
    """Starlette's own errors in our shape; the middleware renders them."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    if status == 404:
        raise HTTPError(unknown_url(request.method, request.url.path))
    if status == 405:
        raise HTTPError(method_not_supported(request.method, (headers or {}).get("Allow", "")))
    raise RuntimeError("an unexpected HTTP error") from error
