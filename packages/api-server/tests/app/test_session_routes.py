"""Names of sessions in requests, and the routes that give sessions up."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.requests import GenerationRequest
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.clients import clients_of

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BODIES = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
    "/v1/messages": {**CHAT, "model": "fake"},
}


class NamingEngine(FakeEngineClient):
    """Keeps what requests say of their sessions."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[tuple[str, bool]] = []

    async def submit(self, *requests: GenerationRequest) -> Any:
        self.sessions += [(request.session, request.is_session_final) for request in requests]
        return await super().submit(*requests)


@pytest.fixture
def engine() -> NamingEngine:
    return NamingEngine()


@pytest.mark.parametrize("path", BODIES)
async def test_a_session_has_the_name_that_its_client_gives_it(engine: NamingEngine, path: str) -> None:
    app, body = build_app(ready_state(engine)), BODIES[path]
    assert (await call(app, "POST", path, body)).status == 200
    assert (await call(app, "POST", path, {**body, "session_id": "s", "session_final": True})).status == 200
    assert (await call(app, "POST", path, {**body, "prompt_cache_key": "k"})).status == 200
    assert (await call(app, "POST", path, {**body, "session_id": "s", "prompt_cache_key": "k"})).status == 200
    headers = {"x-session-id": "h"}
    assert (await call(app, "POST", path, body, headers=headers)).status == 200
    assert (await call(app, "POST", path, {**body, "prompt_cache_key": "k"}, headers=headers)).status == 200
    assert (await call(app, "POST", path, {**body, "session_id": "s"}, headers=headers)).status == 200
    assert (await call(app, "POST", path, body)).status == 200
    assert engine.sessions == [
        ("", False), ("s", True), ("k", False), ("s", False), ("h", False), ("h", False), ("s", False), ("", False),
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["session_id", "prompt_cache_key"])
async def test_a_name_that_is_too_long_is_refused(engine: NamingEngine, field: str) -> None:
    refused = await call(build_app(ready_state(engine)), "POST", "/v1/completions", {"prompt": "a", field: "n" * 257})
    error = refused.json()["error"]
    assert (refused.status, error["code"], error["param"]) == (400, "string_above_max_length", field)
    assert engine.sessions == []


async def test_a_session_is_given_up_by_its_name(engine: NamingEngine) -> None:
    engine.released = (1, 320)
    app = build_app(ready_state(engine))
    expected = {"id": "s", "object": "session", "deleted": True, "released_tokens": 320}
    assert (await call(app, "DELETE", "/v1/sessions/s")).json() == expected
    assert (await call(app, "POST", "/close_session", {"session_id": "s"})).json() == expected
    assert engine.operations == [("release_sessions", "", "s")] * 2


async def test_an_unknown_session_is_not_found(engine: NamingEngine) -> None:
    app = build_app(ready_state(engine))
    for answer in (
        await call(app, "DELETE", "/v1/sessions/s"),
        await call(app, "POST", "/close_session", {"session_id": "s"}),
    ):
        assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("body", "code"),
    [({}, "missing_required_parameter"), ({"session_id": 5}, "invalid_type"),
     ({"session_id": "n" * 257}, "string_above_max_length"), ({"session_id": ""}, "string_below_min_length")],
)  # fmt: skip
async def test_what_names_no_session_is_refused(engine: NamingEngine, body: dict[str, Any], code: str) -> None:
    refused = await call(build_app(ready_state(engine)), "POST", "/close_session", body)
    assert (refused.status, refused.json()["error"]["code"]) == (400, code)
    assert engine.operations == []


async def test_a_key_gives_up_its_own_sessions_alone(engine: NamingEngine) -> None:
    engine.released = (1, 0)
    state = ready_state(engine, HTTPConfig(api_keys=(Secret("alice"), Secret("bob"))))
    app = build_app(state)
    for key in ("alice", "bob"):
        headers = {"authorization": f"Bearer {key}"}
        assert (await call(app, "DELETE", "/v1/sessions/s", headers=headers)).status == 200
    tenants = [client.tenant for client in clients_of(state.config)]
    assert engine.operations == [("release_sessions", tenant, "s") for tenant in tenants]
    assert len(set(tenants)) == 2
    assert (await call(app, "DELETE", "/v1/sessions/s")).status == 401


async def test_a_name_in_a_path_may_have_parts(engine: NamingEngine) -> None:
    engine.released = (1, 0)
    app = build_app(ready_state(engine))
    assert (await call(app, "DELETE", "/v1/sessions/user/1")).json()["id"] == "user/1"
    refused = await call(app, "DELETE", "/v1/sessions/")
    assert (refused.status, refused.json()["error"]["code"]) == (400, "string_below_min_length")
    assert engine.operations == [("release_sessions", "", "user/1")]
