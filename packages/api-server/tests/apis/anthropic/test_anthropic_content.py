"""Deltas become content blocks, and the blocks are what the official client makes of the events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given
from hypothesis import strategies as st

from llmstack_output_parsers import ToolCallDelta
from llmstack_server.apis.anthropic import content
from llmstack_server.apis.anthropic.content import ContentBuilder
from llmstack_server.chat.deltas import ChatDelta

START = {
    "type": "message_start",
    "message": {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    },
}  # fmt: skip


def call(index: int, name: str | None = None, arguments: str = "") -> ChatDelta:
    return ChatDelta(0, tool_calls=(ToolCallDelta(index, name and f"call_{index}", name, arguments),))


def build(deltas: Sequence[ChatDelta], **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    builder = ContentBuilder(**options)
    events = [event for delta in deltas for event in builder.add(delta)]
    events += builder.finish()
    return events, builder.blocks()


def as_the_client_reads(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that the official client accumulates."""
    snapshot, buffers = None, {}
    for event in (START, *events):
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return [block.model_dump(exclude_unset=True) for block in snapshot.content]


def test_thoughts_words_and_parallel_calls_are_blocks_of_their_own():
    deltas = [
        ChatDelta(0, reasoning="Let me"),
        ChatDelta(0, "I look.", reasoning=" see."),
        call(0, "find", '{"a"'),
        call(0, arguments=":1}"),
        call(1, "find"),
        ChatDelta(0),
    ]
    events, blocks = build(deltas)
    assert blocks == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_0", "name": "find", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_1", "name": "find", "input": {}},
    ]
    assert as_the_client_reads(events) == blocks
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]


def test_text_that_comes_with_the_end_of_a_call_is_behind_it():
    events, blocks = build([call(0, "find", '{"a"'), replace(call(0, arguments=":1}"), content=" Done.")])
    assert blocks == [
        {"type": "tool_use", "id": "call_0", "name": "find", "input": {"a": 1}},
        {"type": "text", "text": " Done."},
    ]
    assert as_the_client_reads(events) == blocks


def test_hidden_thoughts_are_an_empty_block():
    events, blocks = build([ChatDelta(0, reasoning="Hm."), ChatDelta(0, "a")], hides_thinking=True)
    assert blocks == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": "a"}]
    assert as_the_client_reads(events) == blocks


@pytest.mark.parametrize(
    "arguments", ['{"a":', "[1]", "7", "[" * 100_000, '{"a":"\\ud800"}', '{"a":' * 60 + "{}" + "}" * 60]
)
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str):
    _events, blocks = build([call(0, "find", arguments)])
    assert blocks[0]["input"] == {"INVALID_JSON": arguments}


@pytest.mark.parametrize(
    "arguments",
    ['{"a":' + "[" * 80 + "]" * 80 + "}", '{"a":[' + "[]," * (1 << 16) + "[]]}"],
)
def test_arguments_that_are_costly_to_decode_are_shown_as_they_are(arguments: str, monkeypatch: pytest.MonkeyPatch):
    json.loads(arguments)  # they are JSON
    sizes: list[int] = []
    monkeypatch.setattr(content, "argument_object", lambda text: sizes.append(len(text)) or {})
    _events, blocks = build([call(0, "find", arguments)])
    assert blocks[0]["input"] == {"INVALID_JSON": arguments}
    assert sizes == [], "it is refused before it is decoded"


def test_saying_nothing_is_no_block():
    assert build([ChatDelta(0)]) == ([], [])


TEXTS = st.builds(ChatDelta, st.just(0), content=st.text("ab", max_size=3), reasoning=st.text("ab", max_size=2))


@given(st.lists(st.none() | TEXTS, max_size=8))
def test_the_client_reads_what_the_whole_answer_holds(pieces: list[ChatDelta | None]):
    """None stands for a call."""
    deltas = [call(index, "f", "{}") if piece is None else piece for index, piece in enumerate(pieces)]
    events, blocks = build(deltas)
    assert as_the_client_reads(events) == blocks
    assert "".join(block["text"] for block in blocks if block["type"] == "text") == "".join(d.content for d in deltas)
