"""Deltas become the events of a response, and the object is what the events add up to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from llmstack_llm.outputs.request_output import Logprob, RequestOutput
from llmstack_output_parsers import ToolCallDelta
from llmstack_server.apis.responses.objects import ResponseObject
from llmstack_server.apis.responses.protocol import ResponseRequest
from llmstack_server.apis.responses.run import ResponseRun
from llmstack_server.chat.deltas import ChatDelta
from llmstack_server.chat.prepare import SubmittedChat
from llmstack_server.testing.engine_client import FakeStream
from llmstack_server.web.errors import engine_unavailable
from llmstack_types import SamplingParams

Event = dict[str, Any]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class ScriptedUsage:
    """Counts that never change."""

    def as_object(self) -> dict[str, Any]:
        details = {"cached_tokens": 2}
        return {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12, "prompt_tokens_details": details}


async def empty_outputs(number: int) -> AsyncIterator[tuple[int, RequestOutput]]:
    for _ in range(number):
        yield 0, RequestOutput("r", None, [])


class ScriptedRun(ResponseRun):
    """A run over given deltas, one of each output."""

    def __init__(self, deltas: Sequence[ChatDelta], response: ResponseObject) -> None:
        super().__init__(SubmittedChat(FakeStream([], empty_outputs(len(deltas))), None), response)
        self._deltas = iter(deltas)
        self.usage = ScriptedUsage()  # type: ignore[assignment]  # counts alone

    def read(self, output: RequestOutput) -> list[ChatDelta]:
        return [next(self._deltas)]


def new_run(deltas: Sequence[ChatDelta], **fields: Any) -> ResponseRun:
    request = ResponseRequest.model_validate(fields)
    status = "queued" if request.background else "in_progress"
    response = ResponseObject("resp_1", "m", request, SamplingParams(), is_stored=True, status=status)
    return ScriptedRun(deltas, response)


async def events_of(run: ResponseRun) -> list[Event]:
    return [event async for event in run.events()]


def call(index: int, name: str | None = None, arguments: str = "") -> ChatDelta:
    return ChatDelta(0, tool_calls=(ToolCallDelta(index, name and f"call_{index}", name, arguments),))


def last(reason: str = "stop", text: str = "") -> ChatDelta:
    return ChatDelta(0, text, finish_reason=reason)


def check_as_the_client_does(events: Sequence[Event]) -> None:
    """Types, order and accumulation, as the official client has them."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for event in events:
        state.handle_event(EVENTS.validate_python(json.loads(json.dumps(event))))
    final = events[-1]["response"]
    Response.model_validate(final)
    assert [item["id"] for item in final["output"]] == [
        event["item"]["id"] for event in events if event["type"] == "response.output_item.done"
    ]
    if events[-1]["type"] == "response.completed":
        assert state._completed_response is not None


async def test_a_text_has_its_events_in_order():
    events = await events_of(new_run([ChatDelta(0, "Hel"), ChatDelta(0), last(text="lo")]))
    check_as_the_client_does(events)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["response"]["status"] for event in events if "response" in event] == [
        "in_progress",
        "in_progress",
        "completed",
    ]
    response = events[-1]["response"]
    message = response["output"][0]
    assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert (message["status"], message["role"]) == ("completed", "assistant")
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }
    assert response["completed_at"] is not None
    assert "usage" not in events[0]["response"]


async def test_thoughts_words_and_parallel_calls_are_items_of_their_own():
    deltas = [
        ChatDelta(0, reasoning="Let me"),
        ChatDelta(0, reasoning=" see."),
        ChatDelta(0, "I look."),
        call(0, "find", '{"a"'),
        call(0, arguments=":1}"),
        call(1, "find", "{}"),
        last("tool_calls"),
    ]
    events = await events_of(new_run(deltas))
    check_as_the_client_does(events)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]] == [
        ("call_0", "find", '{"a":1}'),
        ("call_1", "find", "{}"),
    ]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == ['{"a":1}', "{}"]


async def test_text_that_comes_with_the_end_of_a_call_is_behind_it():
    deltas = [call(0, "find", '{"a"'), replace(call(0, arguments=":1}"), content=" Done."), last("tool_calls")]
    events = await events_of(new_run(deltas))
    check_as_the_client_does(events)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "message"]
    assert output[0]["arguments"] == '{"a":1}'


async def test_a_cut_answer_is_incomplete_and_so_is_its_last_item():
    events = await events_of(new_run([ChatDelta(0, reasoning="Hm."), ChatDelta(0, "Hel"), last("length", "lo")]))
    check_as_the_client_does(events)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["completed_at"] is None


async def test_saying_nothing_is_an_empty_message():
    events = await events_of(new_run([last()]))
    check_as_the_client_does(events)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_a_response_of_the_background_is_queued_before_the_first_token():
    run = new_run([last(text="a")], background=True)
    events = run.events()
    kinds = [(event["type"], event["response"]["status"]) for event in [await anext(events) for _ in range(3)]]
    assert kinds == [
        ("response.created", "queued"),
        ("response.queued", "queued"),
        ("response.in_progress", "in_progress"),
    ]
    await events.aclose()


async def test_a_failure_keeps_what_has_come_and_says_why():
    run = new_run([ChatDelta(0, "Hel"), last()])
    events = run.events()
    seen = [await anext(events) for _ in range(5)]
    await events.aclose()
    failed = run.fail(engine_unavailable("The engine is gone."))
    assert failed["type"] == "response.failed"
    assert failed["sequence_number"] == len(seen)
    response = failed["response"]
    assert (response["status"], response["error"]) == (
        "failed",
        {"code": "server_error", "message": "The engine is gone."},
    )
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert response["output"][0]["status"] == "incomplete"
    Response.model_validate(response)


async def test_logprobs_belong_to_the_text_and_wait_for_it():
    def said(text: str, *tokens: str, **fields: Any) -> ChatDelta:
        ids = [ord(token) for token in tokens]
        positions = [{token_id: Logprob(-0.5, 1, chr(token_id))} for token_id in ids]
        return ChatDelta(0, text, token_ids=ids, logprobs=positions, **fields)

    deltas = [
        said("", "r", reasoning="r"),
        said("", "a"),
        said("ab", "b"),
        said("", "<", tool_calls=(ToolCallDelta(0, "call_0", "find", "{}"),)),
        said("c", "c"),
        said("", "$", finish_reason="stop"),
    ]
    events = await events_of(new_run(deltas, top_logprobs=1))
    check_as_the_client_does(events)
    output = events[-1]["response"]["output"]
    texts = [part for item in output if item["type"] == "message" for part in item["content"]]
    assert [[entry["token"] for entry in part["logprobs"]] for part in texts] == [["a", "b"], ["c", "$"]]
    assert texts[0]["logprobs"][0]["top_logprobs"][0]["token"] == "a"


PIECES = st.one_of(
    st.builds(ChatDelta, st.just(0), content=st.text("ab", max_size=3)),
    st.builds(ChatDelta, st.just(0), reasoning=st.text("ab", max_size=3)),
)


@given(st.lists(PIECES, max_size=8), st.integers(0, 3), st.sampled_from(["stop", "length"]), st.booleans())
async def test_any_deltas_make_events_that_the_client_accepts(
    pieces: list[ChatDelta], num_calls: int, reason: str, is_background: bool
):
    calls = [call(index, "f", "{}") for index in range(num_calls)]
    events = await events_of(new_run([*pieces, *calls, last(reason)], background=is_background))
    check_as_the_client_does(events)
    output = events[-1]["response"]["output"]
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    assert "".join(texts) == "".join(piece.content for piece in pieces)


@pytest.mark.parametrize(("usage", "expected"), [({"completion_tokens_details": {"reasoning_tokens": 3}}, 3), ({}, 0)])
async def test_reasoning_tokens_are_counted_where_the_stream_counts_them(usage: dict[str, Any], expected: int):
    run = new_run([last(text="a")])
    plain = ScriptedUsage.as_object
    run.usage.as_object = lambda: plain(run.usage) | usage  # type: ignore[method-assign,arg-type]
    response = (await events_of(run))[-1]["response"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}
