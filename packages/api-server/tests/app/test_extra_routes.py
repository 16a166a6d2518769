"""Routes of the user's own: a function by name, behind the same keys, limits and errors as ours."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.responses import Response

from llmstack_server.apis.openai.completions import prepare_completion
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.secret import Secret
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.answers import GenerationResponse, WholeAnswer


async def prepare_shout(state: ServerState, body: dict[str, Any]) -> WholeAnswer:
    return await prepare_completion(state, {"prompt": str(body["say"]).upper(), "max_tokens": 5})


def add_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/shout")
    async def shout() -> Response:
        """Says it loudly."""
        return GenerationResponse(state, prepare_shout)

    @router.get("/whisper/{word}")
    async def whisper(word: str) -> Response:
        """Fails, by way of FastAPI."""
        raise RuntimeError(word)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("my_routes")
    found.add_routes = add_routes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_routes", found)


async def test_an_endpoint_of_ones_own_runs_like_ours():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(extra_routes=("my_routes:add_routes",))))
    answer = await call(app, "POST", "/shout", {"say": "hello"})
    assert (answer.status, answer.json()["choices"][0]["text"]) == (200, "HELLO")
    assert "/shout" in (await call(app, "GET", "/openapi.json")).json()["paths"]
    assert (await call(app, "POST", "/shout", b"{")).json()["error"]["type"] == "invalid_request_error"
    broken = await call(app, "POST", "/shout", {})
    assert (broken.status, broken.json()["error"]["code"]) == (500, "internal_error")


async def test_an_unexpected_error_of_a_route_of_fastapi_is_rendered_as_any_other():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(extra_routes=("my_routes:add_routes",))))
    broken = await call(app, "GET", "/whisper/secret")
    assert (broken.status, broken.json()["error"]["code"]) == (500, "internal_error")
    assert b"secret" not in broken.body


async def test_it_needs_the_same_key():
    http = HTTPConfig(extra_routes=("my_routes:add_routes",), api_keys=(Secret("k"),))
    assert (await call(build_app(ready_state(FakeEngineClient(), http)), "POST", "/shout", {"say": "a"})).status == 401


def test_what_cannot_be_loaded_is_named():
    with pytest.raises(ServeError, match="--extra-routes absent:x cannot be loaded: ModuleNotFoundError"):
        build_app(ready_state(FakeEngineClient(), HTTPConfig(extra_routes=("absent:x",))))
