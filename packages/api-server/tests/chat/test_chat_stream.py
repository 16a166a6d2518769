"""A whole answer is its stream added up: for any text, however the engine's outputs are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm import CompletionOutput, GenerationRequest, Logprob, RequestOutput
from llmstack_output_parsers import TOOL_PARSERS, ThinkParser
from llmstack_server.chat.deltas import ChatMessage, ToolCall, fold
from llmstack_server.chat.reading import ReadingPlan, ReasoningPlan
from llmstack_server.chat.stream import ChatStream
from llmstack_server.chat.tools import ToolMode, check_tools
from llmstack_server.testing import FakeEngineClient

TOOLS = [{"type": "function", "function": {"name": "now"}}]
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", '{"name": "now", "arguments": {"a": "b"}}', "</tool_call>", "\n", "Hi ",
    '[{"name": "now", "parameters": {}}', "]", "[now(a=1)]", "<function=now>", "<parameter=a>", "b</function>", "{",
    "é",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


class CutEngine(FakeEngineClient):
    """Says its text in the given pieces; a token is a character, and `<` and `>` are the tags of reasoning."""

    def __init__(self, text: str, places: Sequence[int], num_choices: int) -> None:
        super().__init__()
        bounds = [0, *sorted({place for place in places if 0 < place < len(text)}), len(text)]
        self._pieces = [text[start:end] for start, end in pairwise(bounds)]
        self._num_choices = num_choices

    async def _outputs(self, request_id: str, prompt: Any) -> AsyncIterator[RequestOutput]:
        """One output per piece, for all choices."""
        for number, piece in enumerate(self._pieces):
            reason = "stop" if number == len(self._pieces) - 1 else None
            ids = [ord(character) for character in piece]
            outputs = [
                CompletionOutput(index, piece, ids, None, [{one: Logprob(-1.0)} for one in ids], reason)
                for index in range(self._num_choices)
            ]
            yield RequestOutput("r", None, [1], outputs=outputs, num_cached_tokens=0)


def plan(form: str | None, mode: ToolMode, *, is_parallel: bool, thinks: bool) -> ReadingPlan:
    choice = TOOLS[0] if mode is ToolMode.NAMED else str(mode)
    tool_use = check_tools(TOOLS, choice, is_parallel=is_parallel)
    reasoning = ReasoningPlan(ThinkParser, None, True, (ord("<"), ord(">")), len) if thinks else None
    parser = TOOL_PARSERS[form] if form is not None and mode is ToolMode.AUTO else None
    return ReadingPlan(tool_use, parser, reasoning)


async def answer(text: str, places: Sequence[int], reading: ReadingPlan) -> tuple[list[ChatMessage], Any]:
    """The messages, their ids put aside, and the usage."""
    engine = CutEngine(text, places, num_choices=2)
    outputs = await engine.submit(GenerationRequest("r", "Hi", engine.check_sampling({"n": 2})))
    stream = ChatStream(outputs, None if reading.is_trivial else reading)
    async with stream.outputs:
        messages = fold([delta async for output in stream.outputs for delta in stream.read(output)])
    for message in messages:
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
        message.tool_calls = [replace(call, id="") for call in message.tool_calls]
    return messages, stream.usage.as_object()


@given(
    text=texts,
    places=st.lists(st.integers(1, 80), max_size=10),
    form=st.sampled_from(sorted(TOOL_PARSERS)),
    mode=st.sampled_from(ToolMode),
    is_parallel=st.booleans(),
    thinks=st.booleans(),
)
async def test_deltas_add_up_to_the_same_messages_however_they_are_cut(
    text: str, places: list[int], form: str, mode: ToolMode, is_parallel: bool, thinks: bool
):
    reading = plan(form, mode, is_parallel=is_parallel, thinks=thinks)
    whole, streamed = await answer(text, [], reading), await answer(text, places, reading)
    assert streamed == whole
    messages, usage = whole
    assert messages[0].token_ids == [ord(character) for character in text]
    assert [list(position) for position in messages[0].logprobs or ()] == [[ord(character)] for character in text]
    assert usage["completion_tokens"] == 2 * len(text)
    assert ("completion_tokens_details" in usage) == thinks


async def test_folding_keeps_choices_and_calls_apart():
    text = '<think>a</think><tool_call>{"name": "now", "arguments": {"a": "b"}}</tool_call>'
    reading = plan("hermes", ToolMode.AUTO, is_parallel=True, thinks=True)
    messages, _ = await answer(text, range(1, 80), reading)
    assert [message.index for message in messages] == [0, 1]
    for message in messages:
        assert (message.content, message.reasoning, message.finish_reason) == ("", "a", "tool_calls")
        assert message.tool_calls == [ToolCall("", "now", '{"a": "b"}')]
