"""Middleware of the user's own: ASGI classes and async functions, by name."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import pytest
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Hello", "max_tokens": 50}
seen: list[int] = []


class Stamp:
    """An ASGI class that adds a header."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"]).append("x-order", "class")
            await send(message)

        await self._app(scope, receive, stamped)


async def observe(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """A function that sees statuses, and refuses one path itself."""
    if request.url.path == "/forbidden":
        return JSONResponse({"no": True}, status_code=403)
    response = await call_next(request)
    seen.append(response.status_code)
    response.headers.append("x-order", "function")
    return response


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("my_middleware")
    found.Stamp, found.observe, found.number = Stamp, observe, 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_middleware", found)
    seen.clear()


def app_with(*names: str, **options: Any) -> Any:
    return build_app(ready_state(FakeEngineClient(), HTTPConfig(middleware=names, **options)))


@pytest.mark.parametrize("name", ["my_middleware:Stamp", "my_middleware.Stamp"])
async def test_an_asgi_class_wraps_the_application(name: str):
    answer = await call(app_with(name), "POST", COMPLETIONS, BODY)
    assert (answer.status, answer.headers["x-order"]) == (200, "class")
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_async_function_sees_requests_and_responses(stream: bool):
    answer = await call(app_with("my_middleware:observe"), "POST", COMPLETIONS, {**BODY, "stream": stream})
    assert (answer.status, answer.headers["x-order"]) == (200, "function")
    assert seen == [200]
    if stream:
        assert answer.events()[-1] == "[DONE]"
        assert len(answer.parts) > 50


async def test_it_sees_refusals_as_statuses_and_may_refuse_itself():
    app = app_with("my_middleware:observe", api_keys=(Secret("k"),))
    answer = await call(app, "POST", COMPLETIONS, BODY)
    assert (answer.status, answer.json()["error"]["code"]) == (401, "missing_api_key")
    assert (await call(app, "POST", COMPLETIONS, {"prompt": 5}, {"authorization": "Bearer k"})).status == 400
    assert seen == [401, 400]
    assert (await call(app, "GET", "/forbidden")).json() == {"no": True}


async def test_a_client_that_leaves_still_aborts_its_request():
    engine = FakeEngineClient(step_delay_s=0.005)
    app = build_app(ready_state(engine, HTTPConfig(middleware=("my_middleware:observe",))))
    await call(app, "POST", COMPLETIONS, {**BODY, "stream": True}, disconnect_after_parts=3)
    assert len(engine.aborted_request_ids) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("absent_module:x", "cannot be loaded: ModuleNotFoundError"),
        ("my_middleware:absent", "cannot be loaded: AttributeError"),
        ("my_middleware:number", "neither a class nor an async function"),
    ],
)
def test_what_cannot_be_used_is_named(name: str, reason: str):
    with pytest.raises(ServeError, match=reason) as caught:
        app_with(name)
    assert caught.value.exit_code == 2
