"""`--state-dir`: streams of an earlier server go on, and its finished answers are not generated again."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_server.app import build_app
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError
from llmstack_server.options.secret import Secret
from llmstack_server.state import kept_rows, stream_rows, stream_saver, stream_table, write_behind
from llmstack_server.state.answer_source import OTHER_TEXT
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state
from llmstack_server.web import restarts
from llmstack_server.web.receipts import check_signature, make_key, open_signer

from .test_resumable import CHATS, COMPLETIONS, HeldEngine, text_of

MESSAGES = "/v1/messages"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "stream": True}
COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 20, "stream": True}
KEY = {"Idempotency-Key": "mine"}
KEYS = ("key of the first", "key of the second")
SECRET = b"s" * 32


@dataclass
class Running:
    app: Any
    state: ServerState
    engine: FakeEngineClient

    async def post(self, body: Any, path: str = CHATS, headers: Any = KEY, **options: Any) -> Answer:
        return await call(self.app, "POST", path, body, headers, **options)

    async def rest(self, stream_id: str, after: int = 0, headers: Any = None) -> Answer:
        return await call(self.app, "GET", f"/v1/streams/{stream_id}?after={after}", None, headers or {})


@asynccontextmanager
async def server(
    folder: Path, engine: FakeEngineClient | None = None, *, contract: str = "one", keys: tuple[str, ...] = (),
    chat: ChatOptions | None = None,
) -> AsyncIterator[Running]:  # fmt: skip
    engine = engine or FakeEngineClient()
    folder.mkdir(mode=0o700, exist_ok=True)  # noqa: ASYNC240 (a test)
    state = ready_state(engine, HTTPConfig(state_dir=str(folder), api_keys=tuple(map(Secret, keys))), chat=chat)
    assert state.ready is not None
    state.config = replace(state.config, deployment_secret=SECRET)
    state.ready = replace(state.ready, numeric_contract_id=contract, backends={"numeric_contract": "holds"})
    app = build_app(state)
    for begin in state.at_ready:
        begin()
    try:
        yield Running(app, state, engine)
    finally:
        state.lifecycle.advance(LifecycleState.DRAINING)
        state.in_flight.cut()
        await state.in_flight.wait_until_idle(5)
        for end in state.at_end:
            await end()


@dataclass
class Killed:
    """A server that was killed while it sent a stream: its folder, and what the client has received."""

    folder: Path
    stream_id: str
    received: Answer


def copied(folder: Path, target: Path) -> Path:
    """The folder of a server as a kill at this moment leaves it."""
    shutil.copytree(folder, target, copy_function=shutil.copyfile)
    target.chmod(0o700)
    for file in target.iterdir():
        file.chmod(0o600)
    return target


async def killed_midway(
    tmp_path: Path, path: str = CHATS, body: Any = CHAT, headers: Any = KEY, keys: tuple[str, ...] = ()
) -> Killed:
    """Ends a client after a few events, and copies the folder as a kill at that moment leaves it."""
    engine = HeldEngine(num_free_tokens=7)
    async with server(tmp_path / "before", engine, keys=keys) as before:
        sending = asyncio.create_task(before.post(body, path, headers, disconnect_after_bytes=700))
        await wait_until(lambda: engine.num_held)
        received = await sending
        assert before.state.streams.saver is not None
        await before.state.streams.saver.saved()
        folder = copied(tmp_path / "before", tmp_path / "killed")
        engine.gate.set()
    return Killed(folder, received.headers["x-llmstack-stream-id"], received)


def events_of(*answers: Answer) -> list[tuple[int, bytes]]:
    """Numbers and data of all events."""
    found = []
    for answer in answers:
        for event in answer.body.split(b"\n\n")[:-1]:  # the last one may be cut
            match = re.match(rb"id: [0-9a-f]{32}\.(\d+)\n(?:event: [^\n]*\n)?data: (.*)", event)
            if match:
                found.append((int(match[1]), match[2]))
    return found


SEVERAL = CHAT | {"n": 2, "logprobs": True, "top_logprobs": 1}


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (CHATS, SEVERAL), (COMPLETIONS, COMPLETION)])
async def test_a_stream_goes_on_after_its_server_was_killed(tmp_path: Path, path: str, body: Any):
    killed = await killed_midway(tmp_path, path, body)
    first = events_of(killed.received)
    assert first
    assert first[-1][1] != b"[DONE]"
    async with server(killed.folder) as after:
        rest = await after.rest(killed.stream_id, first[-1][0])
        plain = await after.post(body, path, {})
    events = events_of(killed.received, rest)
    assert [number for number, _ in events] == list(range(1, len(events) + 1))
    assert events[-1][1] == b"[DONE]"
    expected = [line.removeprefix(b"data: ") for line in plain.body.split(b"\n\n") if line]
    assert text_of([event for _, event in events], path) == text_of(expected, path) != ""
    assert len({json.loads(event)["id"] for _, event in events[:-1]}) == 1
    own = re.compile(rb'"id":"[^"]*"|"created":\d+')
    assert [own.sub(b"", event) for _, event in events] == [own.sub(b"", event) for event in expected]


async def test_a_reader_from_the_beginning_gets_the_same_events_after_a_restart(tmp_path: Path):
    killed = await killed_midway(tmp_path)
    async with server(killed.folder) as after:
        whole = await after.rest(killed.stream_id)
        again = await after.rest(killed.stream_id)
    first = events_of(killed.received)
    assert events_of(whole)[: len(first)] == first
    assert events_of(whole)[-1][1] == b"[DONE]"
    assert again.body == whole.body


async def test_the_receipt_of_a_stream_that_goes_on_names_the_answer_that_its_reader_has(tmp_path: Path):
    pytest.importorskip("cryptography", reason="needs the extra llmstack-server[receipts]")
    make_key(tmp_path / "key.pem")
    killed = await killed_midway(tmp_path, COMPLETIONS, COMPLETION)
    async with server(killed.folder) as after:
        after.state.receipts = open_signer(str(tmp_path / "key.pem"))
        rest = await after.rest(killed.stream_id, len(events_of(killed.received)))
    first, *others = [json.loads(event) for _, event in events_of(killed.received, rest)[:-1]]
    (receipt,) = [event["receipt"] for event in others if "receipt" in event]
    check_signature(receipt)
    assert (receipt["answer"], receipt["created"]) == (first["id"], first["created"])


async def test_a_message_goes_on_after_its_server_was_killed(tmp_path: Path):
    pytest.importorskip("cryptography", reason="needs the extra llmstack-server[receipts]")
    make_key(tmp_path / "key.pem")
    signer = open_signer(str(tmp_path / "key.pem"))
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "stream": True}
    killed = await killed_midway(tmp_path, MESSAGES, body)
    first = events_of(killed.received)
    async with server(killed.folder) as after:
        after.state.receipts = signer
        rest = await after.rest(killed.stream_id, first[-1][0])
        after.state.receipts = None
        plain = await after.post(body, MESSAGES, {})
    events = [json.loads(event) for _, event in events_of(killed.received, rest)]
    expected = [json.loads(match) for match in re.findall(rb"data: (.*)", plain.body)]

    def text(found: list[Any]) -> str:
        return "".join(event["delta"].get("text", "") for event in found if event["type"] == "content_block_delta")

    assert text(events) == text(expected) != ""
    assert [event["type"] for event in events].count("message_start") == 1
    assert events[-1]["type"] == "message_stop"
    check_signature(events[-2]["receipt"])
    assert events[-2]["receipt"]["answer"] == events[0]["message"]["id"]


async def test_a_retry_after_a_restart_joins_what_goes_on_and_what_has_ended(tmp_path: Path):
    killed = await killed_midway(tmp_path)
    async with server(killed.folder) as after:
        joined = await after.post(CHAT)
        assert events_of(joined)[-1][1] == b"[DONE]"
        assert len(after.engine.admitted) == 1
        reused = await after.post(CHAT | {"max_tokens": 3})
        assert (reused.status, reused.json()["error"]["code"]) == (400, "idempotency_key_reused")
    async with server(killed.folder) as third:
        assert (await third.post(CHAT)).body == joined.body
        assert not third.engine.admitted


async def test_a_whole_answer_is_generated_for_the_retry_after_a_restart(tmp_path: Path):
    body = CHAT | {"stream": False}
    engine = HeldEngine()
    async with server(tmp_path / "state", engine) as before:
        await before.post(body, disconnect_after_parts=0)
        await wait_until(lambda: engine.num_held)
    async with server(tmp_path / "state") as after:
        await wait_until(lambda: len(after.engine.admitted) == 1)  # before any retry
        answer = await after.post(body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello" * 4
        assert len(after.engine.admitted) == 1


async def test_a_stream_that_a_drain_cuts_goes_on_in_the_next_server(tmp_path: Path):
    engine = HeldEngine(num_free_tokens=7)
    async with server(tmp_path / "state", engine) as before:
        sending = asyncio.create_task(before.post(CHAT, disconnect_after_bytes=700))
        await wait_until(lambda: engine.num_held)
        received = await sending
    async with server(tmp_path / "state") as after:
        first = events_of(received)
        rest = await after.rest(received.headers["x-llmstack-stream-id"], first[-1][0])
    text = text_of([event for _, event in events_of(received, rest)], CHATS)
    assert text == "Hello" * 4
    assert b"error" not in rest.body


async def test_a_finished_answer_leaves_for_a_stream_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = HeldEngine(num_free_tokens=9)
    async with server(tmp_path / "state", engine) as before:
        finished = await before.post(CHAT | {"max_tokens": 2}, headers={"Idempotency-Key": "finished"})
        sending = asyncio.create_task(before.post(CHAT, disconnect_after_bytes=700))
        await wait_until(lambda: engine.num_held)
        received = await sending
    monkeypatch.setattr(stream_table, "MAX_PER_OWNER", 1)
    async with server(tmp_path / "state") as after:
        last = events_of(received)[-1][0]
        assert events_of(await after.rest(received.headers["x-llmstack-stream-id"], last))[-1][1] == b"[DONE]"
        assert (await after.rest(finished.headers["x-llmstack-stream-id"])).status == 404


async def test_another_model_ends_a_stream_with_an_error_after_what_was_seen(tmp_path: Path):
    killed = await killed_midway(tmp_path)
    async with server(killed.folder, contract="another") as after:
        number = events_of(killed.received)[-1][0]
        rest = await after.rest(killed.stream_id, number)
        assert rest.status == 200
        assert restarts.OTHER_MODEL.encode() in rest.body
        whole = await after.rest(killed.stream_id)  # what was seen is not encoded for another model
        assert (whole.status, whole.json()["error"]["code"]) == (503, "engine_unavailable")
        assert not after.engine.admitted
    async with server(killed.folder) as third:
        assert (await third.rest(killed.stream_id, number)).status == 404


async def test_another_text_ends_a_stream_with_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    killed = await killed_midway(tmp_path)
    engine = FakeEngineClient()
    engine.script = "Another text than before."
    async with server(killed.folder, engine) as after:
        rest = await after.rest(killed.stream_id, events_of(killed.received)[-1][0])
    assert OTHER_TEXT.encode() in rest.body
    assert f"a saved stream cannot go on: {OTHER_TEXT}" in caplog.text


async def test_a_stream_of_another_key_is_unknown_after_a_restart_too(tmp_path: Path):
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    killed = await killed_midway(tmp_path, headers=KEY | mine, keys=KEYS)
    async with server(killed.folder, keys=KEYS) as after:
        assert (await after.rest(killed.stream_id, 1, theirs)).status == 404
        assert (await after.rest(killed.stream_id, 1, mine)).status == 200


async def test_a_request_that_ends_each_server_is_given_up(tmp_path: Path):
    killed = await killed_midway(tmp_path)
    with sqlite3.connect(killed.folder / stream_rows.FILE_NAME) as connection:
        change = "UPDATE answers SET facts = json_set(facts, '$.request.num_resumes', ?)"
        connection.execute(change, (restarts.MAX_RESUMES,))
    connection.close()
    async with server(killed.folder) as after:
        rest = await after.rest(killed.stream_id, 1)
        assert b"error" in rest.body
        assert not after.engine.admitted


async def test_streams_that_are_too_old_are_deleted(tmp_path: Path):
    killed = await killed_midway(tmp_path)
    with sqlite3.connect(killed.folder / stream_rows.FILE_NAME) as connection:
        connection.execute("UPDATE answers SET written_at = written_at - ?", (stream_rows.MAX_DOWNTIME_S,))
    connection.close()
    async with server(killed.folder) as after:
        assert (await after.rest(killed.stream_id, 1)).status == 404
    with sqlite3.connect(killed.folder / stream_rows.FILE_NAME) as connection:
        for table in ("pieces", "log"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    connection.close()


async def test_a_full_disk_leaves_streams_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(kept_rows.KeptRows, "write", fail)
    async with server(tmp_path / "state") as running:
        answer = await running.post(CHAT)
        assert events_of(answer)[-1][1] == b"[DONE]"
        assert (await running.rest(answer.headers["x-llmstack-stream-id"])).body == answer.body


async def test_a_stream_beyond_the_limits_of_the_next_server_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    killed = await killed_midway(tmp_path)
    monkeypatch.setattr(stream_table, "MAX_PER_OWNER", 0)
    async with server(killed.folder) as after:
        assert (await after.rest(killed.stream_id, 1)).status == 404
    monkeypatch.undo()
    async with server(killed.folder) as third:
        assert (await third.rest(killed.stream_id, 1)).status == 404
        assert not third.engine.admitted


@pytest.mark.parametrize("fails", [True, False])
async def test_a_stream_that_could_not_be_kept_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
):
    monkeypatch.setattr(stream_saver, "RETRY_S", 0.01)
    monkeypatch.setattr(write_behind, "MAX_WRITE_S", 0.05)
    well = threading.Event()
    write = kept_rows.KeptRows.write

    def write_or_not(*values: Any) -> None:
        if fails and not well.is_set():
            raise sqlite3.OperationalError("database or disk is full")
        well.wait(20)  # a disk that does not answer
        write(*values)

    engine = HeldEngine(num_free_tokens=4)
    async with server(tmp_path / "state", engine) as before:
        sending = asyncio.create_task(before.post(CHAT))
        await wait_until(lambda: engine.num_held)
        assert before.state.streams.saver is not None
        await before.state.streams.saver.saved()
        monkeypatch.setattr(kept_rows.KeptRows, "write", write_or_not)
        engine.gate.set()
        received = await sending  # in memory alone
        again = await before.post(CHAT, headers={"Idempotency-Key": "another"})
        assert [events_of(answer)[-1][1] for answer in (received, again)] == [b"[DONE]"] * 2
        assert "cannot be kept" in caplog.text
        well.set()
    assert caplog.text.count("cannot be kept") <= 2  # and not once for each attempt
    async with server(tmp_path / "state") as after:
        assert (await after.rest(received.headers["x-llmstack-stream-id"], 1)).status == 404
        assert not after.engine.admitted


def test_a_damaged_database_is_refused_by_name(tmp_path: Path):
    tmp_path.chmod(0o700)
    path = tmp_path / stream_rows.FILE_NAME
    path.write_bytes(b"not a database" * 100)
    path.chmod(0o600)
    with pytest.raises(ServeError, match=re.escape(stream_rows.FILE_NAME)):
        build_app(ready_state(FakeEngineClient(), HTTPConfig(state_dir=str(tmp_path))))
