"""Comments in streams that pause."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_insight.explain import Explanation
from llmstack_server.app import build_app
from llmstack_server.app.explain_routes import add_reader
from llmstack_server.state import slow_readers
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web import keep_alive
from llmstack_server.web.keep_alive import COMMENT, EventSender, with_comments
from llmstack_types import EngineDeadError

STREAM = {"prompt": "Hello", "max_tokens": 2, "stream": True}


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "INTERVAL_S", 0.02)


class Connection:
    """An ASGI `send` that notes what was sent, and blocks while `may_write` is not set."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.may_write = asyncio.Event()
        self.part_writer: Writer | None = None
        self.may_write.set()

    async def __call__(self, message: Any) -> None:
        await self.may_write.wait()
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]


async def test_a_stream_that_pauses_contains_comments_that_change_nothing_else():
    engine = FakeEngineClient()
    app = build_app(ready_state(engine))
    plain = await call(app, "POST", "/v1/completions", STREAM)
    engine.step_delay_s = 0.2
    paused = await call(app, "POST", "/v1/completions", STREAM)
    assert paused.parts[0] == COMMENT, "it begins before the first token"
    assert COMMENT in paused.parts[paused.parts.index(next(p for p in paused.parts if p != COMMENT)) :]
    assert len([part for part in paused.parts if part != COMMENT]) == len(plain.parts)
    assert paused.headers["content-type"] == plain.headers["content-type"]
    assert paused.parts[-1] == b"data: [DONE]\n\n"


async def test_an_error_after_a_comment_is_the_last_event():
    engine = FakeEngineClient(step_delay_s=0.2)
    engine.error, engine.num_tokens_before_error = EngineDeadError("gone"), 1
    answer = await call(build_app(ready_state(engine)), "POST", "/v1/completions", STREAM)
    assert answer.status == 200
    assert answer.parts[0] == COMMENT
    assert b"engine_unavailable" in answer.parts[-1]


async def test_a_stream_that_fails_before_the_first_comment_has_its_own_status(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keep_alive, "INTERVAL_S", 60.0)
    engine = FakeEngineClient()
    engine.error = EngineDeadError("gone")
    assert (await call(build_app(ready_state(engine)), "POST", "/v1/completions", STREAM)).status == 503


async def test_comments_go_on_until_the_end_and_headers_are_sent_once():
    connection = Connection()
    sender = EventSender(connection, [(b"x", b"y")])
    await wait_until(lambda: len(connection.bodies) >= 2)
    await sender.event(b"data")
    await wait_until(lambda: connection.bodies[-1] == COMMENT)
    await sender.end(b"end")
    num_sent = len(connection.messages)
    await asyncio.sleep(0.1)
    assert len(connection.messages) == num_sent
    assert connection.messages[-1] == {"type": "http.response.body", "body": b"end", "more_body": False}
    starts = [message for message in connection.messages if message["type"] == "http.response.start"]
    assert starts == [{"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]}]


async def test_a_reader_that_does_not_read_is_sent_no_comments():
    connection = Connection()
    connection.may_write.clear()
    sender = EventSender(connection, [])
    sending = asyncio.create_task(sender.event(b"data"))
    await asyncio.sleep(0.1)
    connection.may_write.set()
    await sending
    await sender.stop()
    assert connection.bodies == [b"data"]


async def test_an_event_follows_a_comment_that_the_reader_has_not_taken_yet():
    connection = Connection()
    connection.may_write.clear()
    sender = EventSender(connection, [])
    await wait_until(lambda: sender._comment is not None)
    sending = asyncio.create_task(sender.event(b"data"))
    await asyncio.sleep(0.05)
    assert not connection.messages
    connection.may_write.set()
    await sending
    await sender.end(b"end")
    assert connection.bodies == [COMMENT, b"data", b"end"]


async def test_a_comment_that_waits_for_its_reader_holds_up_no_end():
    connection = Connection()
    sender = EventSender(connection, [])
    await sender.event(b"data")
    connection.may_write.clear()
    await wait_until(lambda: sender._comment is not None)
    async with asyncio.timeout(30):
        await sender.stop()
    connection.may_write.set()
    await sender.end(b"end")
    assert connection.bodies == [b"data", b"end"]


async def test_events_that_are_read_again_come_with_comments_and_are_closed_with_their_reader():
    has_closed = asyncio.Event()
    may_end = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await may_end.wait()
            yield b"last"
        finally:
            has_closed.set()

    found = []
    async for event in with_comments(events()):
        found.append(event)
        if found.count(COMMENT) == 2:
            may_end.set()
    assert [event for event in found if event != COMMENT] == [b"first", b"last"]
    has_closed.clear()
    may_end.clear()
    stream = with_comments(events())
    assert await anext(stream) == b"first"
    assert await anext(stream) == COMMENT
    await stream.aclose()  # type: ignore[attr-defined]
    assert has_closed.is_set()


async def test_the_wait_for_a_slow_reader_is_measured_and_explained(monkeypatch: pytest.MonkeyPatch):
    state = ready_state(FakeEngineClient())
    app = build_app(state)

    async def slow_connection(scope: Any, receive: Any, send: Any) -> None:
        async def take_late(message: Any) -> None:
            await asyncio.sleep(0.06)
            await send(message)

        await app(scope, receive, take_late)

    answer = await call(slow_connection, "POST", "/v1/completions", STREAM)
    slow = next(json.loads(part[6:])["id"] for part in answer.parts if part.startswith(b"data: {"))
    waited_s = state.slow_readers.waited_s(f"{slow}-0")
    assert waited_s is not None
    assert waited_s >= 0.12
    found = Explanation(f"{slow}-0")
    await add_reader(found, state)
    assert found.facts["slow_client_ms"] >= 120
    assert found.sentences[-1].endswith("until its client had read: a slow client.")
    monkeypatch.setattr("llmstack_server.state.slow_readers.MIN_WAIT_S", waited_s + 60.0)
    answer = await call(slow_connection, "POST", "/v1/completions", STREAM)
    quick = next(json.loads(part[6:])["id"] for part in answer.parts if part.startswith(b"data: {"))
    assert state.slow_readers.waited_s(f"{quick}-0") is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"x-llmstack-resume": "60"}])
async def test_the_wait_for_each_reader_of_a_stream_counts(path: str, body: Any, headers: dict[str, str]):
    state = ready_state(FakeEngineClient())
    app = build_app(state)
    late_s = 0.06

    async def slow_connection(scope: Any, receive: Any, send: Any) -> None:
        async def take_late(message: Any) -> None:
            await asyncio.sleep(late_s)
            await send(message)

        await app(scope, receive, take_late)

    answer = await call(slow_connection, "POST", path, body | {"max_tokens": 2, "stream": True}, headers)
    assert answer.status == 200
    ((request_id, waited_s),) = state.slow_readers._waited_s.items()
    assert request_id in answer.body.decode()
    assert waited_s >= late_s
    if headers:
        stream_id = answer.headers["x-llmstack-stream-id"]
        await call(slow_connection, "GET", f"/v1/streams/{stream_id}?after=1")
        ((_, in_all_s),) = state.slow_readers._waited_s.items()
        assert in_all_s >= waited_s + late_s


def test_so_many_slow_readers_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slow_readers, "MAX_STREAMS", 2)
    kept = slow_readers.SlowReaders()
    for name in ("a", "b", "c"):
        kept.note(name, "one", 1.0)
    assert [kept.waited_s(name) for name in ("a", "b", "c")] == [None, 1.0, 1.0]


class Writer:
    """The other way to the same connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.flow = self
        self.write_paused = False

    def write(self, data: bytes) -> None:
        self._connection.messages.append({"type": "http.response.body", "body": data})


async def test_events_are_pushed_only_where_none_before_them_waits():
    connection = Connection()
    sender = EventSender(connection, [])
    assert not sender.push(bytes, b"never"), "it takes messages alone"
    await sender.stop()
    connection.part_writer = writer = Writer(connection)
    sender = EventSender(connection, [])
    await sender.event(b"first")
    assert sender.push(bytes, b"second")
    assert sender.push(bytes, b"")
    writer.write_paused = True
    assert not sender.push(bytes, b"never")
    writer.write_paused = False
    connection.may_write.clear()
    sending = asyncio.create_task(sender.event(b"third"))
    await asyncio.sleep(0)
    assert not sender.push(bytes, b"never")
    connection.may_write.set()
    await sending
    assert sender.push(bytes, b"fourth")
    await sender.end(b"fifth")
    assert connection.bodies == [b"first", b"second", b"third", b"fourth", b"fifth"]


async def test_nothing_is_pushed_before_a_comment_that_waits_for_its_reader():
    connection = Connection()
    connection.part_writer = Writer(connection)
    sender = EventSender(connection, [])
    await sender.event(b"first")
    connection.may_write.clear()
    await wait_until(lambda: not sender.push(bytes, b""))
    connection.may_write.set()
    await sender.event(b"second")
    assert sender.push(bytes, b"third")
    await sender.stop()
    assert connection.bodies == [b"first", COMMENT, b"second", b"third"]


async def test_nothing_is_pushed_past_a_function_that_looks_at_messages():
    connection = Connection()
    connection.part_writer = Writer(connection)

    @functools.wraps(connection)
    async def send(message: Any) -> None:
        await connection(message)

    sender = EventSender(send, [])
    await sender.event(b"first")
    assert not sender.push(bytes, b"never")
    await sender.stop()
