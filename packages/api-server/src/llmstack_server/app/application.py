"""Construction of the ASGI application."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from llmstack_llm import request_errors
from llmstack_server import server_version
from llmstack_server.app.routes import build_router
from llmstack_server.observability.telemetry.middleware import ObservingMiddleware
from llmstack_server.options.errors import ServeError
from llmstack_server.options.http_options import RateLimits
from llmstack_server.options.named_objects import load_named
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import PREDICTED_TTFT_HEADER, PREDICTED_WAIT_HEADER
from llmstack_server.web.dispatch import RouteMiddleware
from llmstack_server.web.errors import HTTPError, method_not_supported, unknown_url
from llmstack_server.web.middleware import (
    AuthenticationMiddleware,
    ErrorMiddleware,
    RequestContextMiddleware,
)
from llmstack_server.web.optional_routes import advice_on, folder_of
from llmstack_server.web.rate_limit import RateLimitMiddleware
from llmstack_server.web.routes import Router, RouteTable, route_path
from llmstack_server.web.stream_answer import RESUMABLE_HEADER, STREAM_ID_HEADER

_EXPOSED_HEADERS = (
    "x-request-id", "request-id", "retry-after", "retry-after-ms", PREDICTED_WAIT_HEADER, PREDICTED_TTFT_HEADER,
    RESUMABLE_HEADER, STREAM_ID_HEADER,
)  # fmt: skip


class Application(FastAPI):
    """FastAPI's application with our middleware around its own, which then sees only what `RouteMiddleware` passes on.

    Attributes:
        table: Its routes.
    """

    table: RouteTable

    def build_middleware_stack(self) -> ASGIApp:
        """The layers, without those of FastAPI on the way to a direct route."""
        ours, self.user_middleware = self.user_middleware, []
        app = super().build_middleware_stack()
        self.user_middleware = ours
        for layer, arguments, options in reversed(ours):
            app = layer(app, *arguments, **options)
        return app

    def openapi(self) -> dict[str, object]:
        """The description of all routes, made once."""
        if self.openapi_schema is None:
            from llmstack_server.web.openapi_document import complete_document  # late: it has a type for each answer

            complete_document(super().openapi(), self.table)
        return super().openapi()


def build_app(state: ServerState) -> Application:
    """The application of one server. It starts nothing; `state` decides what is answered."""
    return make_app(state, build_router(state))


def build_model_app(state: ServerState) -> Application:
    """The application of one of several models, behind the layers of a server that are before all of them."""
    return make_app(state, build_router(state), is_inner=True)


def make_app(
    state: ServerState, router: Router, *, is_inner: bool = False, has_several_models: bool = False
) -> Application:
    """The application with the routes of a router; with `has_several_models` it is before all of them.

    `is_inner`: Whether requests have passed the layers of another application: their ids, keys and limits are checked,
    and it renders errors.
    """
    http = state.config.http
    app = Application(
        title="llmstack",
        version=server_version(),
        docs_url=None,  # FastAPI's own page loads its assets from a CDN; ours is a route
        redoc_url=None,
        openapi_url="/openapi.json" if http.has_docs else None,
        redirect_slashes=False,
    )
    app.include_router(router)
    app.add_exception_handler(HTTPException, _translator(router.routes, has_several_models=has_several_models))
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(Exception, _raise)
    app.table = RouteTable(router.routes)
    if is_inner:
        app.add_middleware(RouteMiddleware, state=state, table=app.table)
    else:
        _add_middleware(app, state)
    state.application = app
    return app


def _add_middleware(app: Application, state: ServerState) -> None:
    """Adds middleware from the innermost to the outermost."""
    http = state.config.http
    app.add_middleware(RouteMiddleware, state=state, table=app.table)
    if http.rate_limits != RateLimits():
        app.add_middleware(RateLimitMiddleware, state=state)
    if http.api_keys:  # without keys every client is `EVERYONE`
        app.add_middleware(AuthenticationMiddleware, state=state, table=app.table)
    if http.middleware or http.cors.origins:
        app.add_middleware(ErrorMiddleware)  # outer middleware receives answers, not exceptions, and can add headers
    add_custom_middleware(app, http.middleware)
    if http.cors.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(http.cors.origins),
            allow_methods=list(http.cors.methods),
            allow_headers=list(http.cors.headers),
            allow_credentials=http.cors.allows_credentials,
            expose_headers=list(_EXPOSED_HEADERS),
        )
    if state.telemetry is not None:
        app.add_middleware(ObservingMiddleware, observers=state.telemetry.observers)
    app.add_middleware(RequestContextMiddleware, state=state, table=app.table)


async def _refuse(request: Request, error: Exception) -> NoReturn:
    """Raises what FastAPI finds wrong in a query as an error about that parameter."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    reason = str(first["msg"])
    raise request_errors.invalid_value(str(first["loc"][-1]), reason[:1].lower() + reason[1:])


async def _raise(request: Request, error: Exception) -> NoReturn:
    """Leaves unexpected errors to the middleware, which renders them."""
    raise error


def _translator(
    routes: Sequence[BaseRoute], *, has_several_models: bool
) -> Callable[[Request, Exception], Awaitable[NoReturn]]:
    """Raises Starlette's own errors as `HTTPError`; the middleware renders them."""

    async def translate(request: Request, error: Exception) -> NoReturn:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        if status == 404:
            advice = _advice(routes, request, has_several_models=has_several_models)
            raise HTTPError(unknown_url(request.method, request.url.path, advice))
        if status == 405:
            allowed = _methods(routes, route_path(request.scope)) or (headers or {}).get("Allow", "")
            raise HTTPError(method_not_supported(request.method, allowed))
        raise RuntimeError("an unexpected HTTP error") from error

    return translate


def _advice(routes: Sequence[BaseRoute], request: Request, *, has_several_models: bool) -> str:
    """A sentence about a path without a route.

    It names the option that opens such a path, or the path with the prefix of OpenAI's API, or without a doubled one,
    where that is a route. Empty where neither helps.
    """
    path = route_path(request.scope)
    folder = folder_of(path)
    if folder and not _methods(routes, folder):
        return advice_on(folder, has_several_models=has_several_models)
    candidates = (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/"))
    meant = next((one for one in candidates if one != path and _methods(routes, one)), "")
    return f"Did you mean {meant}?" if meant else ""


def _methods(routes: Sequence[BaseRoute], path: str) -> str:
    """The methods of all routes of a path, or of its pattern; Starlette names those of the first one only."""
    found = [route for route in routes if isinstance(route, Route) and route.path_regex.match(path)]
    exact = [route for route in found if route.path == path]
    methods: set[str] = set()
    for route in exact or found:
        methods |= route.methods or set()
    return ", ".join(sorted(methods))


def add_custom_middleware(app: FastAPI, names: tuple[str, ...]) -> None:
    """Adds each middleware to the application, the last one outermost.

    Raises:
        ServeError: A middleware cannot be loaded, or is neither a class nor an async function.
    """
    for name in names:
        found: Any = load_middleware(name)
        if isinstance(found, type):
            app.add_middleware(cast("Any", found))
        else:
            app.add_middleware(BaseHTTPMiddleware, dispatch=found)


def load_middleware(name: str) -> object:
    """The ASGI class, or async function of a request and `call_next`, at `module:name` or `module.name`.

    Raises:
        ServeError: It cannot be loaded; the text says why.
    """
    found = load_named("--middleware", name)
    if not isinstance(found, type) and not inspect.iscoroutinefunction(found):
        raise ServeError(f"--middleware {name[:128]} is neither a class nor an async function", exit_code=2)
    return found
