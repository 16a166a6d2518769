"""Streams of events, well formed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_bench.result import RequestResult
from llmstack_bench.stream import EventLines, StreamError, StreamRecorder


def record(events: list[tuple[float, Any]], *, closes: bool = True) -> RequestResult:
    """The result of (time, event) pairs of a request sent at 10 s."""
    result = RequestResult()
    recorder = StreamRecorder(result, 10.0)
    for now_s, event in events:
        recorder.take(event if isinstance(event, bytes) else json.dumps(event).encode(), now_s)
    if closes:
        recorder.close()
    return result


def text(piece: str, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": piece, "finish_reason": finish_reason}], **more}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish_reason}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def test_times_are_those_of_the_tokens_and_counts_the_servers():
    result = record(
        [(10.5, text("a")), (10.6, text("")), (10.9, text("c", "length")), (11, {"choices": [], **usage(7, 3)}),
         (12, b"[DONE]")]
    )  # fmt: skip
    assert result.ttft_s == pytest.approx(0.5)
    assert result.token_gaps_s == pytest.approx([0.1, 0.3])
    assert result.e2e_s == pytest.approx(0.9)
    assert (result.num_prompt_tokens, result.num_output_tokens, result.num_chunks) == (7, 3, 3)
    assert result.tpot_s == pytest.approx(0.2)


def test_without_usage_chunks_are_counted():
    result = record([(11, text("a")), (12, text("b", "length")), (12, b"[DONE]")])
    assert (result.num_output_tokens, result.num_prompt_tokens, result.has_usage) == (2, None, False)


def test_a_last_chunk_without_text_is_no_token():
    result = record([(11, text("a")), (12, text("", "stop")), (12, b"[DONE]")])
    assert result.num_chunks == 1
    assert result.token_gaps_s == []


def test_a_chunk_of_several_tokens_counts_as_equal_gaps_where_the_server_says_so():
    events = [
        (11, text("a", **usage(4, 1))),
        (11.3, text("bcd", **usage(4, 4))),
        (11.4, text("e", "length", **usage(4, 5))),
    ]
    result = record(events)
    assert result.token_gaps_s == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert result.num_output_tokens == 5
    assert result.num_chunks == 3


def test_an_answer_that_ends_at_once_has_its_token_when_it_ends():
    result = record(
        [(11, delta(role="assistant", content="")), (12, text("", "stop")), (12.1, usage(4, 1)), (12.2, b"[DONE]")]
    )
    assert (result.ttft_s, result.num_output_tokens, result.token_gaps_s) == (2, 1, [])


def test_the_role_of_a_chat_is_no_token_and_reasoning_and_tools_are():
    result = record(
        [(11, delta(role="assistant", content="")), (12, delta(reasoning_content="hm")), (13, delta(content="a")),
         (14, delta(tool_calls=[{"index": 0}])), (15, delta("stop")), (15, b"[DONE]")]
    )  # fmt: skip
    assert result.ttft_s == pytest.approx(2)
    assert result.token_gaps_s == pytest.approx([1, 1])


def test_a_first_chunk_with_role_and_content_is_a_token():
    assert record([(11, delta("stop", role="assistant", content="a"))]).ttft_s == pytest.approx(1)


def test_a_finish_reason_ends_a_stream_that_lacks_done():
    assert record([(11, text("a", "stop"))]).num_output_tokens == 1


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([(11, text("a"))], "ended early"),
        ([], "ended early"),
        ([(11, b"[DONE]")], "no tokens"),
        ([(11, {"error": {"message": "out of memory"}})], "out of memory"),
        ([(11, {"error": "plain"})], "plain"),
        ([(11, b"{oops")], "is not JSON"),
        ([(11, b"[1]")], "is not an object"),
    ],
)
def test_a_stream_that_is_none_says_why(events: list[tuple[float, Any]], reason: str):
    with pytest.raises(StreamError, match=reason):
        record(events)


@given(st.lists(st.integers(1, 9), max_size=30))
def test_events_are_the_same_however_the_bytes_are_cut(sizes: list[int]):
    data = b": comment\n\ndata: {1}\r\n\r\ndata:{2}\n\nevent: x\ndata: [DONE]\n\n"
    lines, found, rest = EventLines(), [], data
    for size in sizes:
        found += lines.feed(rest[:size])
        rest = rest[size:]
    found += lines.feed(rest)
    assert found == [b"{1}", b"{2}", b"[DONE]"]


def test_an_endless_event_is_refused():
    lines = EventLines()
    assert list(lines.feed(b"x" * (16 << 20))) == []
    with pytest.raises(StreamError, match="too large"):
        list(lines.feed(b"x"))
