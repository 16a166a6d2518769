"""Realtime sessions: both forms, limits, refusals before the connection and after it, and their ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from server_helpers.realtime import COMMIT, FINAL, OPENAI, PATH, TEXT, TEXTS, VLLM, append, state_of
from server_helpers.speech import ENGLISH, SpeechEngine
from server_helpers.websocket_client import WebSocketClient

from llmstack_server.app import build_app
from llmstack_server.options.http_options import RealtimeConfig
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_types import EngineDeadError, ServerOverloadedError


@pytest.fixture
async def engine() -> AsyncIterator[SpeechEngine]:
    engine = SpeechEngine(*TEXTS, tokens=ENGLISH)
    yield engine
    await engine.speech.shutdown()


def changed(name: str, value: Any) -> dict[str, Any]:
    """An update in OpenAI's form, with another value at a path behind `session`."""
    session: dict[str, Any] = {"type": "transcription", "audio": {"input": {"transcription": {}, "format": {}}}}
    place, *path = session, *name.split(".")
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return {"type": "session.update", "session": session}


async def test_openai_s_form_has_items_deltas_and_the_text_of_a_file(engine: SpeechEngine) -> None:
    async with WebSocketClient(build_app(state_of(engine)), f"{PATH}?intent=transcription") as client:
        assert client.status == 101
        created = await client.next()
        assert created["type"] == "session.created"
        assert created["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        client.send({**OPENAI, "event_id": "mine"})
        updated = await client.next()
        assert updated["session"]["audio"]["input"]["transcription"]["language"] == "en"
        previous_id = None
        for _ in range(2):
            client.send(append())
            client.send(COMMIT)
            events = await client.until("completed")
            kinds = [event["type"] for event in events if not event["type"].endswith("delta")]
            assert kinds == [
                "input_audio_buffer.committed", "conversation.item.added", "conversation.item.done",
                "conversation.item.input_audio_transcription.completed",
            ]  # fmt: skip
            done = events[-1]
            assert done["transcript"] == TEXT
            assert done["usage"] == {"type": "duration", "seconds": 1.0}
            assert "logprobs" not in done
            assert "".join(event.get("delta", "") for event in events) == TEXT
            committed = next(event for event in events if event["type"].endswith("committed"))
            assert committed["previous_item_id"] == previous_id
            previous_id = committed["item_id"]
            assert {event["item_id"] for event in events if "item_id" in event} == {previous_id}
            assert all(event["event_id"].startswith("event_") for event in events)


async def test_vllm_s_form_has_deltas_and_an_end_with_usage(engine: SpeechEngine) -> None:
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        created = await client.next()
        assert created.keys() >= {"id", "created"}
        client.send(VLLM)
        client.send(COMMIT)
        client.send(append(0.5))
        client.send(append(0.5))
        client.send(FINAL)
        *deltas, done = await client.until("done")
        assert {event["type"] for event in deltas} == {"transcription.delta"}
        assert "".join(event["delta"] for event in deltas) == done["text"] == TEXT
        assert done["usage"]["total_tokens"] == done["usage"]["prompt_tokens"] + done["usage"]["completion_tokens"] > 20
        client.send(FINAL)
        assert (await client.next())["text"] == ""
        client.send({"type": "input_audio_buffer.clear"})
        refused = await client.next()
        assert (refused["type"], refused["code"]) == ("error", "invalid_value")
        assert isinstance(refused["error"], str)


async def test_words_come_while_the_sound_does(engine: SpeechEngine) -> None:
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        client.send(VLLM)
        await client.until("created")
        text = ""
        for _ in range(8):
            client.send(append(0.5))
            await asyncio.sleep(0.05)
        while not text:
            text = (await client.next())["delta"]
        assert TEXT.startswith(text)


async def test_logprobs_prompt_and_other_rates(engine: SpeechEngine) -> None:
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        await client.next()
        update = changed("audio.input.transcription", {"prompt": "Kennedy"})
        update["session"]["audio"]["input"]["format"] = {"type": "audio/pcm", "rate": 48_000}
        update["session"]["include"] = ["item.input_audio_transcription.logprobs"]
        client.send(update)
        client.send(append(1.0, 48_000))
        client.send(changed("audio.input.format.rate", 16_000))
        client.send(COMMIT)
        events = await client.until("completed")
        assert [event["error"]["param"] for event in events if event["type"] == "error"] == [
            "session.audio.input.format.rate"
        ]
        assert events[-1]["usage"]["seconds"] == 1.0
        assert len(events[-1]["logprobs"]) == len("".join(TEXTS))
    prompt: Any = engine.requests[-1].prompt
    assert prompt.token_ids == [302, *b" Kennedy", 301]


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ("no JSON", None, None),
        ([1], "invalid_type", None),
        ({"type": "response.create"}, "invalid_value", "type"),
        ({"type": ["x"]}, "invalid_value", "type"),
        (append(), "invalid_value", "type"),
        (COMMIT, "invalid_value", "type"),
        ({**VLLM, "model": "x"}, "model_not_found", "model"),
        ({**VLLM, "model": 1}, "invalid_type", "model"),
        (changed("type", "realtime"), "unsupported_value", "session.type"),
        (changed("audio", 1), "invalid_type", "session.audio"),
        (changed("include", ["x"]), "invalid_value", "session.include"),
        (changed("audio.input.format.type", "audio/pcmu"), "unsupported_value", "session.audio.input.format.type"),
        (changed("audio.input.format.rate", 8000), "unsupported_value", "session.audio.input.format.rate"),
        (changed("audio.input.turn_detection", {"type": "server_vad"}), "unsupported_parameter",
         "session.audio.input.turn_detection"),
        (changed("audio.input.noise_reduction", {"type": "near_field"}), "unsupported_parameter",
         "session.audio.input.noise_reduction"),
        (changed("audio.input.transcription.language", "xx"), "unsupported_value", "language"),
        (changed("audio.input.transcription.delay", "low"), "unsupported_parameter",
         "session.audio.input.transcription.delay"),
        (changed("audio.input.transcription.prompt", "x" * 9000), "string_above_max_length",
         "session.audio.input.transcription.prompt"),
    ],
)  # fmt: skip
async def test_what_is_not_available_is_named_and_the_session_goes_on(
    engine: SpeechEngine, event: Any, code: str | None, param: str | None
) -> None:
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        await client.next()
        client.send({**event, "event_id": "mine"} if isinstance(event, dict) else event)
        refused = await client.next()
        assert refused["type"] == "error"
        assert (refused["error"]["code"], refused["error"]["param"]) == (code, param)
        assert refused["error"]["event_id"] == ("mine" if isinstance(event, dict) else None)
        client.send(OPENAI)
        assert (await client.next())["type"] == "session.updated"


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "input_audio_buffer.append"}, "invalid_type"),
        ({"type": "input_audio_buffer.append", "audio": "?"}, "invalid_audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "invalid_audio"),
        (COMMIT, "audio_too_short"),
        (VLLM, "invalid_value"),
        (append(61), "audio_too_long"),
    ],
)
async def test_sound_is_checked(engine: SpeechEngine, event: Any, code: str) -> None:
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        client.send(OPENAI)
        await client.until("updated")
        client.send(event)
        refused = await client.next()
        assert (refused["type"], refused["error"]["code"]) == ("error", code)
        client.send(append())
        client.send(COMMIT)
        assert (await client.until("completed"))[-1]["transcript"] == TEXT


async def test_a_message_that_is_too_long_and_too_much_sound_are_named(engine: SpeechEngine) -> None:
    state = state_of(engine)
    object.__setattr__(state.config.engine, "max_audio_seconds", 2.5)
    async with WebSocketClient(build_app(state), PATH) as client:
        client.send(OPENAI)
        await client.until("updated")
        client.send_too_large()
        assert (await client.next())["error"]["code"] == "request_too_large"
        for _ in range(3):
            client.send(append())
            client.send(COMMIT)
        events = await client.until("error")
        assert events[-1]["error"]["code"] == "audio_too_long"


async def test_what_is_cleared_has_no_text(engine: SpeechEngine) -> None:
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        client.send(OPENAI)
        await client.until("updated")
        client.send(append(0.2))
        client.send({"type": "input_audio_buffer.clear"})
        client.send(append())
        client.send(COMMIT)
        events = await client.until("completed")
        assert [one["type"] for one in events if one["type"].startswith("input")] == [
            "input_audio_buffer.cleared", "input_audio_buffer.committed"
        ]  # fmt: skip
        assert events[-1]["usage"]["seconds"] == 1.0


@pytest.mark.parametrize("ending", [{"type": "input_audio_buffer.clear"}, COMMIT])
async def test_sound_that_ends_before_it_is_listened_to_frees_its_room(engine: SpeechEngine, ending: Any) -> None:
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        client.send(OPENAI)
        await client.until("updated")
        for event in (append(), ending) * 3:
            client.send(event)
        await client.until("cleared" if ending != COMMIT else "committed")
    for _ in range(100):
        await asyncio.sleep(0.01)
        if not engine.files._shares.held:
            break
    assert engine.files._shares.held == 0


async def test_a_session_without_messages_ends(engine: SpeechEngine) -> None:
    app = build_app(state_of(engine, realtime=RealtimeConfig(idle_timeout_s=0.05)))
    async with WebSocketClient(app, PATH) as client:
        events = await client.until("error")
        assert events[-1]["error"]["code"] == "session_idle"
        assert (await client.next(), client.close_code) == ({}, 1008)


async def test_a_client_that_waits_for_its_text_is_not_idle(
    engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    async def wait(*requests: Any) -> Any:
        await asyncio.sleep(1.0)
        return await submit(*requests)

    monkeypatch.setattr(engine, "submit", wait)
    app = build_app(state_of(engine, realtime=RealtimeConfig(idle_timeout_s=0.3)))
    async with WebSocketClient(app, PATH) as client:
        for event in (OPENAI, append(), COMMIT):
            client.send(event)
        events = await client.until("error")
        assert [event["transcript"] for event in events if event["type"].endswith("completed")] == [TEXT]
        assert events[-1]["error"]["code"] == "session_idle"


async def test_a_drain_sends_the_rest_and_says_why_the_session_ends(engine: SpeechEngine) -> None:
    state = state_of(engine)
    async with WebSocketClient(build_app(state), PATH) as client:
        client.send(VLLM)
        client.send(append())
        await client.until("created")
        while not engine.speech.counts.session_s:  # noqa: ASYNC110 (the sound is taken)
            await asyncio.sleep(0.01)
        state.lifecycle.advance(LifecycleState.DRAINING)
        state.in_flight.ask_to_end()
        *_, done, error = await client.until("error")
        assert (done["text"], error["code"]) == (TEXT, "server_shutting_down")
        assert (await client.next(), client.close_code) == ({}, 1001)
        assert await state.in_flight.wait_until_idle(5.0)


async def test_a_cut_ends_a_session_at_once(engine: SpeechEngine) -> None:
    state = state_of(engine)
    async with WebSocketClient(build_app(state), PATH) as client:
        await client.next()
        state.in_flight.cut()
        assert (await client.until("error"))[-1]["error"]["code"] == "server_shutting_down"
        assert await state.in_flight.wait_until_idle(5.0)


@pytest.mark.parametrize(
    ("error", "code"), [(EngineDeadError("gone"), "engine_unavailable"), (ValueError("x"), "internal_error")]
)
async def test_an_item_that_fails_is_named_and_leaves_no_room_taken(
    engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    async def submit(*requests: Any) -> Any:
        raise error

    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        client.send(OPENAI)
        await client.until("updated")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "submit", submit)
            client.send(append())
            failed = (await client.until("failed"))[-1]
        assert failed["error"]["code"] == code
        client.send(append())
        client.send(COMMIT)
        assert (await client.until("completed"))[-1]["transcript"] == TEXT


async def test_a_client_that_does_not_read_holds_its_own_session_alone(engine: SpeechEngine) -> None:
    state = state_of(engine, send_timeout_s=0.1)
    app = build_app(state)
    async with WebSocketClient(app, PATH) as client:
        await client.next()
        client.can_read.clear()
        client.send(OPENAI)
        assert await state.in_flight.wait_until_idle(5.0)


async def test_who_sends_faster_than_it_is_transcribed_is_slowed_down(
    engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, submit = asyncio.Event(), engine.submit

    async def wait(*requests: Any) -> Any:
        await going.wait()
        return await submit(*requests)

    monkeypatch.setattr(engine, "submit", wait)
    monkeypatch.setattr("llmstack_server.apis.realtime.session._MAX_AHEAD_S", 3.0)
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        client.send(OPENAI)
        await client.until("updated")
        for _ in range(20):
            client.send(append())
        await asyncio.sleep(0.5)
        assert client.num_unread > 10
        going.set()
        client.send(COMMIT)
        assert (await client.until("completed"))[-1]["usage"]["seconds"] == 20.0


async def test_room_that_other_requests_have_is_waited_for(
    engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, refusals = engine.submit, [ServerOverloadedError("full")] * 2

    async def submit_later(*requests: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await submit(*requests)

    monkeypatch.setattr(engine, "submit", submit_later)
    async with WebSocketClient(build_app(state_of(engine)), PATH) as client:
        client.send(VLLM)
        client.send(append())
        client.send(FINAL)
        assert (await client.until("done"))[-1]["text"] == TEXT
