"""Which realtime sessions are opened: origins, keys, models, the queue, and limits of their number."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from server_helpers.overload import overload
from server_helpers.realtime import PATH, TEXTS, state_of
from server_helpers.speech import ENGLISH, SpeechEngine
from server_helpers.websocket_client import WebSocketClient

from llmstack_server.app import build_app
from llmstack_server.options.http_options import CORSConfig, RateLimits, RealtimeConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state.peers import Peers
from llmstack_server.testing import FakeEngineClient, call


@pytest.fixture
async def engine() -> AsyncIterator[SpeechEngine]:
    engine = SpeechEngine(*TEXTS, tokens=ENGLISH)
    yield engine
    await engine.speech.shutdown()


def origin(value: str) -> dict[str, str]:
    return {"origin": value}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("http", "headers", "subprotocols", "status"),
    [
        ({}, {}, (), 101),
        ({}, origin("http://localhost"), (), 101),
        ({}, origin("https://evil.example"), (), 403),
        ({}, origin("null"), (), 403),
        ({"cors": CORSConfig(origins=("https://good.example",))}, origin("https://good.example"), (), 101),
        ({"api_keys": (Secret("a"),)}, {}, (), 401),
        ({"api_keys": (Secret("a"),)}, bearer("b"), (), 401),
        ({"api_keys": (Secret("a"),)}, bearer("a"), (), 101),
        ({"api_keys": (Secret("a"),)}, {}, ("realtime", "openai-insecure-api-key.a"), 101),
        ({"api_keys": (Secret("a"),)}, {}, ("realtime", "openai-insecure-api-key.b"), 401),
        ({"api_keys": (Secret("a"),)}, {**bearer("a"), **origin("https://evil.example")}, (), 403),
    ],
)
async def test_a_session_is_refused_before_it_is_open(
    engine: SpeechEngine, http: Any, headers: dict[str, str], subprotocols: tuple[str, ...], status: int
) -> None:
    async with WebSocketClient(build_app(state_of(engine, **http)), PATH, headers, subprotocols) as client:
        assert client.status == status, client.body
        assert client.headers["x-request-id"]
        assert client.subprotocol == ("realtime" if status == 101 and subprotocols else None)
        assert status == 101 or b'"error"' in client.body


async def test_only_a_websocket_opens_a_session_and_only_of_a_model_that_transcribes(engine: SpeechEngine) -> None:
    app = build_app(state_of(engine))
    answer = await call(app, "GET", PATH)
    assert (answer.status, answer.json()["error"]["code"]) == (426, "websocket_required")
    async with WebSocketClient(app, f"{PATH}?model=other") as client:
        assert client.status == 404
    async with WebSocketClient(app, "/v1/nothing") as client:
        assert client.status == 404
    async with WebSocketClient(app, "/v1/models") as client:  # a request of HTTP has its answer
        assert (client.status, b'"data"' in client.body) == (200, True)
    async with WebSocketClient(build_app(state_of(FakeEngineClient())), PATH) as client:
        assert client.status == 400
    state = overload(state_of(engine))
    async with WebSocketClient(build_app(state), PATH) as client:
        assert (client.status, b"beyond the server's limit" in client.body) == (503, True)


async def test_sessions_are_limited_of_each_key_and_in_all(engine: SpeechEngine) -> None:
    keys = {"api_keys": (Secret("a"), Secret("b"), Secret("c"))}
    app = build_app(state_of(engine, realtime=RealtimeConfig(max_sessions=2, max_sessions_per_key=1), **keys))
    async with WebSocketClient(app, PATH, bearer("a")) as first:
        assert first.status == 101
        async with WebSocketClient(app, PATH, bearer("a")) as second:
            assert second.status == 429
        async with WebSocketClient(app, PATH, bearer("b")), WebSocketClient(app, PATH, bearer("c")) as third:
            assert third.status == 503
        metrics = (await call(app, "GET", "/metrics", headers=bearer("a"))).body.decode()
        assert 'llmstack:realtime_sessions{model_name="fake"} 1.0' in metrics
    async with WebSocketClient(app, PATH, bearer("a")) as again:
        assert again.status == 101


async def test_the_limits_hold_in_all_api_processes_together(engine: SpeechEngine, tmp_path: Path) -> None:
    keys = {"api_keys": (Secret("a"), Secret("b"), Secret("c"))}
    apps = []
    async with AsyncExitStack() as stack:
        for index in range(2):
            state = state_of(engine, realtime=RealtimeConfig(max_sessions=2, max_sessions_per_key=1), **keys)
            state.peers = await stack.enter_async_context(Peers(tmp_path, index, 2))
            state.config = dataclasses.replace(state.config, deployment_secret=b"of both")
            apps.append(build_app(state))
        async with WebSocketClient(apps[0], PATH, bearer("a")) as first:
            assert first.status == 101
            async with WebSocketClient(apps[1], PATH, bearer("a")) as second:
                assert second.status == 429
            async with (
                WebSocketClient(apps[1], PATH, bearer("b")),
                WebSocketClient(apps[1], PATH, bearer("c")) as third,
            ):
                assert third.status == 503
            async with WebSocketClient(apps[1], PATH, bearer("c")) as fourth:
                assert fourth.status == 101
        async with WebSocketClient(apps[1], PATH, bearer("a")) as again:
            assert again.status == 101


async def test_a_session_counts_against_the_limits_of_a_key(engine: SpeechEngine) -> None:
    app = build_app(state_of(engine, rate_limits=RateLimits(max_concurrent_requests=1)))
    async with WebSocketClient(app, PATH) as first, WebSocketClient(app, PATH) as second:
        assert (first.status, second.status) == (101, 429)
