"""Realtime sessions of a server with several models: query or first event name the model, which stays meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from server_helpers.realtime import COMMIT, OPENAI, PATH, TEXT, TEXTS, append
from server_helpers.several_models import Setup, key_header
from server_helpers.speech import ENGLISH, SpeechEngine
from server_helpers.waiting import wait_until
from server_helpers.websocket_client import WebSocketClient

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import RealtimeConfig
from llmstack_server.options.secret import Secret
from llmstack_server.pool import unnamed_session
from llmstack_server.testing import call

LARGE = f"{PATH}?model=large"


@pytest.fixture
async def server() -> AsyncIterator[Setup]:
    realtime = RealtimeConfig(max_sessions=2, max_sessions_per_key=1)
    keys = (Secret("a"), Secret("b"), Secret("c"))
    made = Setup(HTTPConfig(has_live_page=False, api_keys=keys, realtime=realtime))
    engines = []
    for host in made.hosts.values():
        engine = SpeechEngine(*TEXTS, tokens=ENGLISH)
        engines.append(engine)
        host.make_engine = lambda engine=engine: engine
    yield made
    for engine in engines:
        await engine.speech.shutdown()


async def test_a_session_loads_its_model_and_keeps_it(server: Setup) -> None:
    model = server.pool.models[1]
    session = OPENAI["session"]["audio"]["input"]  # type: ignore[index]  # an object of JSON
    update = {"type": "session.update", "session": {"type": "transcription", "audio": {"input": {
        **session, "transcription": {"model": "large", "language": "en"},
    }}}}  # fmt: skip
    async with WebSocketClient(server.app, LARGE, key_header("a")) as client:
        assert client.status == 101, client.body
        assert (model.is_loaded, model.is_used) == (True, True)
        assert server.hosts["small"].num_starts == 0
        client.send(update)
        client.send(append(1.0))
        client.send(COMMIT)
        events = await client.until("transcription.completed")
        assert events[-1]["transcript"] == TEXT
    assert not model.is_used


def update(model: str | None, **fields: object) -> dict[str, object]:
    sound = {"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": {"model": model, "language": "en"}}
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": sound}}, **fields}


BETA = {"type": "transcription_session.update", "session": {"input_audio_transcription": {"model": "large"}}}


@pytest.mark.parametrize(
    ("first", "kind", "rate"),
    [(update("large"), "session.updated", 16_000), (BETA, "transcription_session.updated", 24_000)],
)
async def test_the_first_update_may_name_the_model(server: Setup, first: object, kind: str, rate: int) -> None:
    large = server.hosts["large"]
    large.may_start.clear()
    async with WebSocketClient(server.app, f"{PATH}?intent=transcription", key_header("a")) as client:
        created = await client.next()
        assert (created["type"], created["session"]["audio"]["input"]["transcription"]["model"]) == (
            "session.created",
            None,
        )
        client.send(first)
        client.send(append(1.0, rate))  # while the model is loaded
        client.send(COMMIT)
        await wait_until(lambda: large.num_starts)
        large.may_start.set()
        events = await client.until("transcription.completed")
        assert (events[0]["type"], events[0]["session"]["id"]) == (kind, created["session"]["id"])
        assert events[0]["session"]["audio"]["input"]["transcription"]["model"] == "large"
        assert events[-1]["transcript"] == TEXT
    assert server.hosts["small"].num_starts == 0
    assert not server.state.in_flight.tenant_to_sessions


async def test_what_names_no_model_is_an_error_and_may_be_sent_again(server: Setup) -> None:
    async with WebSocketClient(server.app, PATH, key_header("a")) as client:
        await client.next()
        for sent, param, code in (
            (append(0.1), "type", "invalid_value"),
            (update(None), "model", "missing_required_parameter"),
            (update("none"), "model", "model_not_found"),
            ("{", None, None),
        ):
            client.send(sent)
            event = await client.next()
            assert (event["type"], event["error"]["param"], event["error"]["code"]) == ("error", param, code)
        client.send(update("small"))
        assert (await client.next())["type"] == "session.updated"


async def test_a_connection_without_a_model_counts_as_a_session_and_ends(
    server: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_session, "MAX_UNNAMED_S", 0.2)
    async with WebSocketClient(server.app, PATH, key_header("a")) as client:
        async with WebSocketClient(server.app, LARGE, key_header("a")) as other:
            assert other.status == 429
        assert (await client.until("error"))[-1]["error"]["code"] == "session_idle"
        assert await client.next() == {}
        assert client.close_code == 1008
    async with WebSocketClient(server.app, PATH, key_header("a")) as client:
        assert client.status == 101


async def test_a_model_that_cannot_be_loaded_ends_the_session_with_an_event(server: Setup) -> None:
    server.pool.models[1].note_failure()
    async with WebSocketClient(server.app, PATH, key_header("a")) as client:
        await client.next()
        client.send(update("large"))
        assert (await client.next())["error"]["code"] == "engine_unavailable"
        await client.next()
        assert client.close_code == 1013


async def test_a_client_that_leaves_while_its_model_is_loaded_frees_its_place(server: Setup) -> None:
    server.hosts["large"].may_start.clear()
    model = server.pool.models[1]
    async with WebSocketClient(server.app, PATH, key_header("a")) as client:
        client.send(update("large"))
        await wait_until(lambda: model.waiting.num_requests)
    assert (model.waiting.num_requests, model.is_used) == (0, False)
    server.hosts["large"].may_start.set()


async def test_a_session_names_a_model_that_its_key_may_use(server: Setup) -> None:
    answer = await call(server.app, "GET", PATH, headers=key_header("a"))
    assert (answer.status, answer.json()["error"]["param"]) == (400, "model")
    async with WebSocketClient(server.app, f"{PATH}?model=none", key_header("a")) as client:
        assert client.status == 404
    async with WebSocketClient(server.app, LARGE) as client:
        assert client.status == 401
    assert (await call(server.app, "GET", LARGE, headers=key_header("a"))).status == 426


async def test_the_sessions_of_all_models_count_together(server: Setup) -> None:
    small = f"{PATH}?model=small"
    async with (
        WebSocketClient(server.app, LARGE, key_header("a")) as first,
        WebSocketClient(server.app, small, key_header("a")) as second,
        WebSocketClient(server.app, small, key_header("b")) as third,
        WebSocketClient(server.app, LARGE, key_header("c")) as fourth,
    ):
        assert [client.status for client in (first, second, third, fourth)] == [101, 429, 101, 503]


async def test_a_client_that_leaves_before_its_session_opens_frees_its_place(server: Setup) -> None:
    server.hosts["large"].may_start.clear()
    model = server.pool.models[1]
    client = WebSocketClient(server.app, LARGE, key_header("a"))
    opening = asyncio.create_task(client.__aenter__())
    await wait_until(lambda: model.waiting.num_requests)
    leaving = asyncio.create_task(client.__aexit__())
    await asyncio.wait_for(leaving, 5.0)
    await asyncio.wait_for(opening, 5.0)
    assert (model.waiting.num_requests, model.is_used) == (0, False)
    server.hosts["large"].may_start.set()
