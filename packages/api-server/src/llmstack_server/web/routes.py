"""Declarations of routes: everything that the layers of a server know of them."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from llmstack_server.web.error_forms import OPENAI_ERRORS, ErrorForm
from llmstack_server.web.openapi import EVENTS, stream_responses

Endpoint = Callable[..., Awaitable[Response]]
Query = Mapping[str, tuple[Mapping[str, object], str]]
"""Parameters of a query by name, each with its schema and its meaning."""


class Body(Protocol):
    """The description of what a route takes. Its `media_type` is that of the content."""

    @property
    def media_type(self) -> str: ...
    def schema(self) -> Mapping[str, object]: ...


class Needs(IntEnum):
    """The least that a route needs; while there is less, it answers 503."""

    NOTHING = 0
    ENGINE = 1
    """A ready engine, though it may sleep."""
    AWAKE = 2
    """An engine that is awake, though the server may be paused."""
    SERVICE = 3
    """A server that takes requests to its model."""


class Key(Enum):
    """The use of an API key, on a server that has any."""

    REQUIRED = 0
    ASKED_BY_PAGE = 1
    """A page for people, which asks for the key itself."""
    UNUSED = 2


class Content(Enum):
    """The content of an answer that is no JSON."""

    EMPTY = 0
    TEXT = 1
    FILE = 2


@dataclass(frozen=True, slots=True, eq=False)
class RouteSpec:
    """The declaration of a route.

    Attributes:
        methods: Names of methods, with blanks between. `HEAD` is not documented.
        path: As FastAPI takes it.
        answer: The type of the JSON that it answers, or its content; None leaves the description to FastAPI.
        body: What it takes.
        query: The parameters of its query that it reads by hand.
        tag: Its chapter of the OpenAPI document.
        is_documented: Whether the OpenAPI document has it.
        streams: Whether its answer may be a stream.
        stream_type: The media type of the stream: events, or lines.
        statuses: Errors besides those of every route like it.
        id_of_answer: The parameter of other paths that takes an id of its answer, and where the answer has it.
        needs: What it needs of the engine.
        key: Its use of an API key.
        is_for_operators: Whether it refuses all other clients.
        waits: Whether its requests wait for the engine, and are refused by their predicted first token.
        is_resumable: Whether it takes `Idempotency-Key`, and its streams can be resumed.
        stores_answers: Whether its answers have a store of their own, which outlives the server.
        is_in_batches: Whether batches may name it.
        takes_untyped: Whether a body without a content type counts as JSON, and so one with the type of `curl -d`.
        errors: The form of its errors.
    """

    methods: str
    path: str
    answer: object = None
    body: Body | None = None
    query: Query | None = None
    tag: str = "Server"
    is_documented: bool = True
    streams: bool = False
    stream_type: str = EVENTS
    statuses: tuple[int, ...] = ()
    id_of_answer: tuple[str, str] | None = None
    needs: Needs = Needs.SERVICE
    key: Key = Key.REQUIRED
    is_for_operators: bool = False
    waits: bool = False
    is_resumable: bool = False
    stores_answers: bool = False
    is_in_batches: bool = False
    takes_untyped: bool = False
    errors: ErrorForm = OPENAI_ERRORS


class DeclaredRoute(APIRoute):
    """A route of FastAPI with its declaration."""

    spec: RouteSpec


class Router(APIRouter):
    """A router whose routes are declared. Those that other code adds get the defaults of a declaration."""

    def declare(self, spec: RouteSpec, summary: str | None = None) -> Callable[[Endpoint], Endpoint]:
        """Adds the decorated endpoint as the route; without a summary its docstring has it."""

        def add(endpoint: Endpoint) -> Endpoint:
            for method in spec.methods.split():
                self.add_api_route(
                    spec.path,
                    endpoint,
                    methods=[method],
                    summary=summary,
                    response_class=Response if isinstance(spec.answer, Content) else JSONResponse,
                    responses=stream_responses(spec.stream_type) if spec.streams else None,
                    include_in_schema=spec.is_documented and method != "HEAD",
                    route_class_override=DeclaredRoute,
                )
                added = self.routes[-1]
                if isinstance(added, DeclaredRoute):
                    added.spec = spec
            return endpoint

        return add

    def batch_paths(self) -> tuple[str, ...]:
        """The paths that batches may name."""
        return tuple(spec.path for spec in map(spec_of, self.routes) if spec.is_in_batches)


class RouteTable:
    """The declarations of an application's routes, by method and path.

    Attributes:
        routes: The routes with their declarations, in order.
        path_to_form: The form of errors of each path as it is declared.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self.routes = [(route, spec_of(route)) for route in routes]
        # By method and path, as far as no earlier route could match; the rest is looked through in order.
        self._exact: dict[tuple[str, str], RouteSpec] = {}
        self._others: list[tuple[BaseRoute, RouteSpec]] = []
        for route, spec in self.routes:
            is_hidden = any(_may_match(other, spec.path) for other, _ in self._others)
            if isinstance(route, APIRoute) and "{" not in route.path and not is_hidden:
                for method in route.methods or ():
                    self._exact.setdefault((method, route.path), spec)
            else:
                self._others.append((route, spec))
        self.path_to_form = {spec.path: spec.errors for _, spec in self.routes}
        self._path_to_key = {spec.path: spec.key for _, spec in self.routes}

    def find(self, scope: Scope) -> RouteSpec | None:
        """The declaration of the route that answers a request; None where no route does, by its path and method."""
        spec = self._exact.get((scope["method"], route_path(scope)))
        if spec is None:
            spec = next((other for route, other in self._others if route.matches(scope)[0] is Match.FULL), None)
        return spec

    def key_of(self, path: str) -> Key:
        """The use of a key at a path, whatever the method; it is required where there is no such route."""
        return self._path_to_key.get(path, Key.REQUIRED)

    def errors_of(self, path: str) -> ErrorForm:
        """The form of errors at a path, and below it, whatever the method; or that of all routes beside it."""
        form = self.path_to_form.get(path)
        if form is None:  # the path of no route, or one with an id
            folders = (folder for folder in self.path_to_form if path.startswith(f"{folder}/"))
            form = self.path_to_form.get(max(folders, key=len, default=""))
        if form is None:  # one that an API has elsewhere, such as Ollama's `/api/pull`
            parent = path[: path.rfind("/") + 1]
            beside = {other for known, other in self.path_to_form.items() if known.startswith(parent)}
            form = beside.pop() if len(beside) == 1 else OPENAI_ERRORS
        return form


def spec_of(route: BaseRoute) -> RouteSpec:
    """The declaration of a route, the default one where other code has added it."""
    if isinstance(route, DeclaredRoute):
        return route.spec
    return RouteSpec("", getattr(route, "path", "unknown"))


def direct_app(route: BaseRoute) -> ASGIApp | None:
    """Calls the endpoint of a route that takes nothing from FastAPI: no parameter, no dependency; else None.

    Each layer of FastAPI passes every chunk of a stream on, which such endpoints do not need.
    """
    if not isinstance(route, APIRoute) or route.dependencies or "{" in route.path:
        return None
    if inspect.signature(route.endpoint).parameters or not inspect.iscoroutinefunction(route.endpoint):
        return None
    endpoint = route.endpoint

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = route
        response = await endpoint()
        await response(scope, receive, send)

    return answer


def route_path(scope: Scope) -> str:
    """The path without the prefix of `--root-path`, whether or not the proxy has removed it."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    if prefix and path.startswith(f"{prefix}/"):
        return path[len(prefix) :]
    return path


def _may_match(route: BaseRoute, path: str) -> bool:
    """Whether a route could answer a path; another application may answer anything."""
    return not isinstance(route, APIRoute) or route.path_regex.match(path) is not None
