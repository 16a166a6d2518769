"""Every route of a server is declared, and its declaration is what the server does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from server_helpers.overload import overload
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.types import Message, Receive, Scope, Send

from llmstack_llm import EngineArgs
from llmstack_server.app import build_app
from llmstack_server.options.adapter_options import AdapterNames
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.options.reload_options import ReloadOptions
from llmstack_server.options.secret import Secret
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web.error_forms import OPENAI_ERRORS
from llmstack_server.web.openapi import EVENTS, LINES
from llmstack_server.web.routes import DeclaredRoute, Key, Needs, Router, RouteSpec, RouteTable, direct_app

SPEC_FIELDS = {field.name for field in dataclasses.fields(RouteSpec)}
# Of each field of a declaration, the test below or elsewhere that it is honoured.
HONOURED_BY = {
    "methods": "test_every_operation_is_documented_as_it_is_declared",
    "path": "test_every_operation_is_documented_as_it_is_declared",
    "answer": "test_openapi_answers.test_every_answer_has_the_form_of_the_document",
    "body": "test_bodies_are_limited_where_there_is_one",
    "query": "test_openapi_answers.test_every_operation_with_json_has_a_schema_and_its_parameters",
    "tag": "test_every_operation_is_documented_as_it_is_declared",
    "is_documented": "test_every_operation_is_documented_as_it_is_declared",
    "streams": "test_every_operation_is_documented_as_it_is_declared",
    "stream_type": "test_every_operation_is_documented_as_it_is_declared",
    "statuses": "test_every_operation_is_documented_as_it_is_declared",
    "id_of_answer": "test_openapi_document.test_answers_that_are_not_json_are_described",
    "needs": "test_a_route_is_refused_while_there_is_less_than_it_needs",
    "key": "test_a_key_is_asked_for_where_it_is_declared",
    "is_for_operators": "test_only_routes_for_operators_refuse_other_keys",
    "waits": "test_only_routes_that_wait_are_refused_by_the_queue",
    "is_resumable": "test_only_resumable_routes_read_an_idempotency_key",
    "stores_answers": "test_restarts, test_persistence",
    "is_in_batches": "test_batches_take_the_declared_routes",
    "takes_untyped": "test_bodies_are_limited_where_there_is_one",
    "errors": "test_errors_have_the_declared_form",
}


def state_with_everything(folder: Path, **http: Any) -> ServerState:
    config = HTTPConfig(enable_control_routes=True, state_dir=str(folder), has_tokenizer_info=True, **http)
    state = ready_state(FakeEngineClient(), config)
    state.config = dataclasses.replace(
        state.config,
        deployment_secret=b"of all processes",
        processes=ProcessConfig(has_sleep_mode=True),
        engine=EngineArgs("fake", profiler_config={"torch_profiler_dir": "traces"}),
        adapters=AdapterNames(root=str(folder)),
        reload=ReloadOptions(reload_models=(f"next={folder}",)),
    )
    return state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def requests_to(app: Any) -> Iterator[tuple[RouteSpec, str, str]]:
    """A request to each route: its declaration, method and path."""
    for route, spec in app.table.routes:
        for method in sorted(route.methods):
            yield spec, method, spec.path.replace("{model:path}", "fake").replace("{", "").replace("}", "")


async def ask(app: Any, method: str, path: str, body: Any = b"{}", **headers: str | None) -> Answer:
    # The feed of the live page never ends.
    leaves = {"disconnect_after_parts": 0} if path.endswith("/events") else {}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await call(app, method, path, body if method == "POST" else None, named, **leaves)


def message_of(answer: Answer) -> str:
    """The message of an error in any form; empty for an answer without one."""
    if answer.status < 400 or not answer.headers["content-type"].startswith("application/json"):
        return ""
    error = answer.json().get("error")
    return "" if error is None else error if isinstance(error, str) else str(error["message"])


def undeclared(routes: Sequence[BaseRoute], known: Sequence[str] = ()) -> list[str]:
    found = []
    for route in routes:
        path = getattr(route, "path", "?")
        inner = getattr(route, "original_router", None) or getattr(route, "routes", None)
        if not isinstance(route, APIRoute) and inner is not None:
            found += undeclared(getattr(inner, "routes", inner), known)
        elif not isinstance(route, DeclaredRoute) and path not in known:
            found.append(path)
    return found


def test_every_route_of_the_application_is_declared(folder: Path) -> None:
    app = build_app(state_with_everything(folder))
    assert undeclared(app.router.routes, [app.openapi_url or ""]) == []
    assert len(app.table.routes) > 60
    assert set(HONOURED_BY) == SPEC_FIELDS


def test_a_route_without_a_declaration_is_found(folder: Path) -> None:
    app = build_app(state_with_everything(folder))

    @app.get("/forgotten")
    async def forgotten() -> None: ...

    assert undeclared(app.router.routes, [app.openapi_url or ""]) == ["/forgotten"]
    router = Router()
    router.get("/also")(forgotten)
    app.include_router(router)
    assert undeclared(app.router.routes, [app.openapi_url or ""]) == ["/forgotten", "/also"]


async def test_every_operation_is_documented_as_it_is_declared(folder: Path) -> None:
    app = build_app(state_with_everything(folder))
    paths = app.openapi()["paths"]
    described = {(path, method.upper()) for path, methods in paths.items() for method in methods}
    declared = set()
    for route, spec in app.table.routes:
        for method in route.methods:
            assert method in spec.methods.split()
            assert (await call(app, "PATCH", spec.path)).headers["allow"].count(method)
            if not spec.is_documented or method == "HEAD":
                continue
            declared.add((route.path_format, method))
            operation = paths[route.path_format][method.lower()]
            assert operation["tags"] == [spec.tag]
            content = operation["responses"]["200"].get("content", {})
            streams = [content[kind] for kind in (EVENTS, LINES) if kind in content]
            assert streams == ([content[spec.stream_type]] if spec.streams else [])
            whole = content.get("application/json")
            assert all(
                one == whole if spec.stream_type == LINES else one["schema"]["required"] == ["data"] for one in streams
            )  # of each event, or line
            assert {str(status) for status in spec.statuses} <= operation["responses"].keys()
    assert described == declared


async def test_bodies_are_limited_where_there_is_one(folder: Path) -> None:
    app = build_app(state_with_everything(folder, max_body_bytes=1000))
    for spec, method, path in requests_to(app):
        if spec.body is None:
            continue
        answer = await ask(app, method, path, content_type="text/plain")
        assert answer.status == 415, (path, answer.body)
        if spec.body.media_type == "application/json":
            answer = await ask(app, method, path, b"{}" + b" " * 1000)
            assert answer.status == 413, (path, answer.body)
            answer = await ask(app, method, path, content_type=None)
            assert (answer.status != 415) == spec.takes_untyped, (path, answer.body)


def not_ready(state: ServerState) -> None:
    state.lifecycle.__init__()  # type: ignore[misc]
    state.lifecycle.advance(LifecycleState.LOADING_MODEL)


def paused(state: ServerState) -> None:
    state.is_paused = True


def asleep(state: ServerState) -> None:
    state.engine.sleep_level = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "refusal", "least"),
    [
        (not_ready, "The server is not ready yet:", Needs.ENGINE),
        (paused, "The server is paused:", Needs.SERVICE),
        (asleep, "The engine is asleep:", Needs.AWAKE),
    ],
)
async def test_a_route_is_refused_while_there_is_less_than_it_needs(
    folder: Path, change: Callable[[ServerState], None], refusal: str, least: Needs
) -> None:
    state = state_with_everything(folder)
    app = build_app(state)
    for spec, method, path in requests_to(app):
        change(state)  # a request may end it
        answer = await ask(app, method, path)
        is_refused = refusal in message_of(answer)
        assert is_refused == (spec.needs >= least), (method, path, answer.status, answer.body)
        assert not is_refused or answer.status == 503


async def test_a_key_is_asked_for_where_it_is_declared(folder: Path) -> None:
    app = build_app(state_with_everything(folder, api_keys=(Secret("a"),)))
    for spec, method, path in requests_to(app):
        answer = await ask(app, method, path, accept="text/html")
        assert (answer.status == 401) == (spec.key is not Key.UNUSED), (method, path, answer.body)
        is_page = answer.headers.get("content-type", "").startswith("text/html")
        assert is_page == (spec.key is Key.ASKED_BY_PAGE), path


async def test_only_routes_for_operators_refuse_other_keys(folder: Path) -> None:
    app = build_app(state_with_everything(folder, api_keys=(Secret("a"), Secret("b"))))
    for spec, method, path in requests_to(app):
        answer = await ask(app, method, path, authorization="Bearer a")
        assert (answer.status == 403) == spec.is_for_operators, (method, path, answer.body)


async def test_only_routes_that_wait_are_refused_by_the_queue(folder: Path) -> None:
    state = overload(state_with_everything(folder))
    app = build_app(state)
    for spec, method, path in requests_to(app):
        answer = await ask(app, method, path, b"not even JSON")
        is_refused = "beyond the server's limit" in message_of(answer)
        assert is_refused == spec.waits, (method, path, answer.body)
        assert not is_refused or answer.status in (503, 529)


async def test_only_resumable_routes_read_an_idempotency_key(folder: Path) -> None:
    app = build_app(state_with_everything(folder))
    for spec, method, path in requests_to(app):
        answer = await ask(app, method, path, idempotency_key="a" * 256)
        is_read = "Idempotency-Key" in message_of(answer)
        assert is_read == (spec.is_resumable and method == "POST"), (method, path, answer.body)


async def test_batches_take_the_declared_routes(folder: Path) -> None:
    app = build_app(state_with_everything(folder))
    for spec, _, path in requests_to(app):
        body = {"input_file_id": "file-1", "endpoint": path, "completion_window": "24h"}
        answer = await call(app, "POST", "/v1/batches", body)
        assert answer.status in (400, 404)
        assert (answer.json()["error"]["param"] != "endpoint") == spec.is_in_batches, path


async def test_errors_have_the_declared_form(folder: Path) -> None:
    app = build_app(state_with_everything(folder))
    for spec, method, path in requests_to(app):
        answer = await ask(app, "PATCH", path)
        assert answer.status == 405, (method, path)
        assert answer.json().keys() == dict(spec.errors.schema)["properties"].keys()
        for name in spec.errors.id_headers:
            assert answer.headers[name] == answer.headers["x-request-id"]
    below = await ask(app, "POST", "/v1/messages/none")
    assert (below.status, below.json()["type"]) == (404, "error")
    assert below.headers["request-id"]
    assert (await ask(app, "POST", "/v1/messages2")).json().keys() == {"error"}


def routes() -> APIRouter:
    router = Router()

    @router.declare(RouteSpec("GET", "/plain", waits=True))
    async def plain() -> Response:
        return Response("plain")

    @router.get("/open/{name}")
    async def named(name: str) -> Response:
        return Response(name)

    @router.get("/open/exact")
    async def hidden() -> Response:
        return Response("exact")

    @router.get("/guarded", dependencies=[Depends(lambda: None)])
    async def guarded() -> Response:
        return Response("guarded")

    router.routes.append(Mount("/mounted", app=APIRouter()))
    return router


@pytest.mark.parametrize(
    ("method", "path", "pattern"),
    [
        ("GET", "/plain", "/plain"), ("POST", "/plain", None), ("GET", "/prefix/plain", "/plain"),
        ("GET", "/open/a", "/open/{name}"), ("GET", "/absent", None), ("GET", "/mounted/x", "/mounted"),
        ("GET", "/open/exact", "/open/{name}"),  # an earlier route that matches too keeps its place
    ],
)  # fmt: skip
def test_a_request_finds_its_declaration(method: str, path: str, pattern: str | None) -> None:
    scope: Scope = {"type": "http", "method": method, "path": path, "root_path": ""}
    if path.startswith("/prefix"):
        scope["root_path"] = "/prefix"
    spec = RouteTable(routes().routes).find(scope)
    assert (None if spec is None else spec.path) == pattern


def test_what_other_code_adds_needs_a_key_and_the_engine() -> None:
    spec = RouteTable(routes().routes).find({"type": "http", "method": "GET", "path": "/open/a"})
    assert spec is not None
    assert (spec.key, spec.needs, spec.waits, spec.errors) == (Key.REQUIRED, Needs.SERVICE, False, OPENAI_ERRORS)


def test_only_a_route_that_takes_nothing_from_fastapi_is_called_without_it() -> None:
    direct = [getattr(route, "path", "") for route in routes().routes if direct_app(route) is not None]
    assert direct == ["/plain", "/open/exact"]


async def test_a_response_sends_without_a_layer_between() -> None:
    sends: list[Send] = []

    class Spy(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            sends.append(send)

    router = Router()

    @router.post("/spy")
    async def spy() -> Response:
        return Spy()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    answer = direct_app(router.routes[0])
    assert answer is not None
    await answer({"type": "http", "method": "POST", "path": "/spy"}, receive, send)
    assert sends == [send]
