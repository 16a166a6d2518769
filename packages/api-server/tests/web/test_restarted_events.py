"""`--state-dir`: the next server makes the same events of a stream, byte by byte, whatever they are."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_llm.requests import GenerationRequest
from llmstack_server.options.chat_options import ChatOptions
from llmstack_server.state import write_behind
from llmstack_server.testing import FakeEngineClient

from .test_restarts import CHAT, COMPLETION, KEY, MESSAGES, SEVERAL, copied, events_of, killed_midway, server
from .test_resumable import CHATS, COMPLETIONS, HeldEngine

PARSERS = ChatOptions(tool_call_parser="hermes")
CALL = 'A call: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
MESSAGE = CHAT | {"model": "fake"}
COUNTED = COMPLETION | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CALL_ID = re.compile(rb'"(call|toolu|chatcmpl-tool)[_-][^"]*"')  # of a call that no reader has is drawn again
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "chat": (CHATS, CHAT, None),
    "choices": (CHATS, SEVERAL, None),
    "prompts": (COMPLETIONS, COMPLETION | {"prompt": ["Hello", "World"], "logprobs": 1}, None),
    "usage": (COMPLETIONS, COUNTED, None),
    "message": (MESSAGES, MESSAGE, None),
    "calls": (CHATS, CHAT | {"tools": TOOLS, "n": 2, "max_tokens": 99}, CALL),
    "tool use": (MESSAGES, MESSAGE | {"tools": [{"name": "f", "input_schema": SCHEMA}], "max_tokens": 99}, CALL),
}


@pytest.mark.parametrize("num_tokens", [1, 7, 15])
@pytest.mark.parametrize("case", CASES)
async def test_a_reader_gets_the_same_bytes_after_any_event(tmp_path: Path, case: str, num_tokens: int):
    path, body, script = CASES[case]
    engine, later = HeldEngine(num_tokens), FakeEngineClient()
    engine.script = later.script = script
    later.num_cached_tokens = 3  # of a cache that was read from disk, say
    async with server(tmp_path / "before", engine, chat=PARSERS) as before:
        sending = asyncio.create_task(before.post(body, path))
        await wait_until(lambda: engine.num_held)
        assert before.state.streams.saver is not None
        await before.state.streams.saver.saved()
        (num_seen,) = [one.num_parts for one in before.state.streams.saver._written.values()]
        folder = copied(tmp_path / "before", tmp_path / "killed")
        engine.gate.set()
        first = await sending  # what its client would have got
    stream_id = first.headers["x-llmstack-stream-id"]
    async with server(folder, later, chat=PARSERS) as after:
        whole = await after.rest(stream_id)
        assert num_seen > 0
        assert events_of(whole)[:num_seen] == events_of(first)[:num_seen]
        assert CALL_ID.sub(b"", whole.body) == CALL_ID.sub(b"", first.body)
        numbers = [number for number, _ in events_of(whole)]
        assert numbers == list(range(1, len(numbers) + 1))
        for number in numbers:
            rest = await after.rest(stream_id, number)
            assert [one for one, _ in events_of(rest)] == numbers[number:]
            assert whole.body.endswith(rest.body)
    assert script is None or CALL_ID.search(whole.body)


async def test_a_client_may_have_more_than_the_disk_where_another_run_has_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(write_behind, "MAX_DELAY_S", 1000.0)
    engine, body = HeldEngine(num_free_tokens=3), CHAT | {"max_tokens": 99}
    async with server(tmp_path / "before", engine) as before:
        saver, table = before.state.streams.saver, before.state.streams.table
        sending = asyncio.create_task(before.post(body))
        await wait_until(lambda: engine.num_held)
        assert saver is not None
        await saver.saved()
        (record,) = table._id_to_record.values()
        num_before = record.num_parts
        engine.gate.set()
        while record.num_parts < num_before + 20:  # noqa: ASYNC110 (each turn of the loop counts)
            await asyncio.sleep(0)
        assert record.num_visible == record.num_parts  # its client has them
        assert [one.num_parts for one in saver._written.values()] == [num_before]
        num_seen = record.num_parts
        folder = copied(tmp_path / "before", tmp_path / "killed")
        first = await sending
    async with server(folder) as after:
        rest = await after.rest(record.id, num_seen)
        whole = await after.rest(record.id)
    assert events_of(rest) == events_of(first)[num_seen:]
    assert whole.body == first.body


class NamingEngine(FakeEngineClient):
    """Keeps the names of sessions in requests."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[str] = []

    async def submit(self, *requests: GenerationRequest) -> Any:
        self.sessions += [request.session for request in requests]
        return await super().submit(*requests)


async def test_the_header_that_names_a_session_does_so_after_a_restart(tmp_path: Path):
    engine = NamingEngine()
    killed = await killed_midway(tmp_path, headers=KEY | {"X-Session-ID": "mine"})
    async with server(killed.folder, engine) as after:
        await after.rest(killed.stream_id)
    assert engine.sessions == ["mine"]
