"""The shortest way to routes that take nothing from FastAPI."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_server.web.middleware import route_path


class DirectRoutes:
    """The innermost middleware: finds a route by its exact path, and calls its endpoint.

    FastAPI looks at one route after the other, and each of its layers passes every chunk of a stream on. Endpoints
    without parameters and dependencies need none of that. FastAPI answers all else, and describes all routes.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = _direct_routes(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        route = self._routes.get((scope["method"], route_path(scope))) if is_http else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        response = await route.endpoint()
        await response(scope, receive, send)


def _direct_routes(routes: Sequence[BaseRoute]) -> dict[tuple[str, str], APIRoute]:
    """The routes that need nothing but their path, by method and path, as far as no earlier route could match."""
    found: dict[tuple[str, str], APIRoute] = {}
    patterns: list[APIRoute] = []
    for route in routes:
        if not isinstance(route, APIRoute):
            break  # another application, which may answer anything
        if _is_direct(route) and not any(earlier.path_regex.match(route.path) for earlier in patterns):
            for method in route.methods or ():
                found.setdefault((method, route.path), route)
        else:
            patterns.append(route)
    return found


def _is_direct(route: APIRoute) -> bool:
    takes_nothing = not route.dependencies and not inspect.signature(route.endpoint).parameters
    return takes_nothing and "{" not in route.path and inspect.iscoroutinefunction(route.endpoint)
