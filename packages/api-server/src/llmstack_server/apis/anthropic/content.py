"""Content blocks of an answer, and the events of their growth."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from llmstack_llm.chat.tool_calls import INVALID_JSON, argument_object
from llmstack_output_parsers import ToolCallDelta
from llmstack_server.chat.deltas import ChatDelta
from llmstack_server.web.errors import HTTPError
from llmstack_server.web.json_structure import JSONLimits, check_structure, without_escapes
from llmstack_types.json_values import JSONObject

Block = JSONObject
Event = Block

# Levels around the object in a request that sends the block back: body, messages, message, content and block.
_OUTER_LEVELS = b"[" * 5


class ContentBuilder:
    """Builds blocks from deltas: at most one is open, and a delta of another kind closes it."""

    def __init__(self, *, hides_thinking: bool = False) -> None:
        """`hides_thinking`: Whether the thinking blocks are empty."""
        self._hides_thinking = hides_thinking
        self._blocks: list[Block] = []
        self._pieces: list[str] = []
        self._kind: str | None = None
        self._call_index: int | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a tool."""
        return any(block["type"] == "tool_use" for block in self._blocks)

    def blocks(self) -> list[Block]:
        """All blocks; complete once `finish` has been called."""
        return self._blocks

    def add(self, delta: ChatDelta) -> Iterator[Event]:
        """The events of a delta; the end of an open call comes before its text."""
        calls = deque(delta.tool_calls)
        while calls and calls[0].id is None:
            yield from self._add_call(calls.popleft())
        if delta.reasoning:
            yield from self._add_thinking(delta.reasoning)
        if delta.content:
            if self._kind != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._more(delta.content, {"type": "text_delta", "text": delta.content})
        for call in calls:
            yield from self._add_call(call)

    def finish(self) -> Iterator[Event]:
        """Closes the block that is open, if any."""
        if self._kind is None:
            return
        self._fill(self._blocks[-1], "".join(self._pieces))
        self._kind = None
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _add_thinking(self, text: str) -> Iterator[Event]:
        if self._kind != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if not self._hides_thinking:
            yield self._more(text, {"type": "thinking_delta", "thinking": text})

    def _add_call(self, call: ToolCallDelta) -> Iterator[Event]:
        if self._kind != "tool_use" or call.index != self._call_index:
            yield from self._begin({"type": "tool_use", "id": call.id or "", "name": call.name or "", "input": {}})
            self._call_index = call.index
        if call.arguments:
            yield self._more(call.arguments, {"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self.finish()
        self._kind = block["type"]
        self._pieces = []
        self._blocks.append(dict(block))
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _more(self, piece: str, delta: dict[str, object]) -> Event:
        self._pieces.append(piece)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _fill(self, block: Block, text: str) -> None:
        if self._kind == "tool_use":
            block["input"] = _arguments(text)
        elif self._kind is not None:
            block[self._kind] = text


def _arguments(text: str) -> dict[str, object]:
    """The object that a model has written; text that is none, or that is costly to decode, under a key of its own."""
    try:
        check_structure(_OUTER_LEVELS + without_escapes(text.encode("utf-8", "replace")), JSONLimits())
    except HTTPError:
        return {INVALID_JSON: text}
    return argument_object(text)
