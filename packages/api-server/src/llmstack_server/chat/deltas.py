"""Deltas of a chat, and the messages they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from llmstack_output_parsers import ToolCallDelta
from llmstack_server.chat.logprobs import Position


@dataclass(slots=True)
class ChatDelta:
    """The new part of one choice.

    Attributes:
        index: The index of the choice, among `n`.
        content, reasoning: New text; may be empty.
        tool_calls: New calls, and new arguments of earlier ones.
        token_ids: Every token since the last delta, including those of withheld text and of markers.
        logprobs: One entry per token; None where not requested.
        finish_reason: Set in the last delta of a choice only, which may carry text as well.
        stop_reason: The stop string or token id that ended it; None for the end of sequence.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[Position] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class ToolCall:
    """A complete call; `arguments` is the model's text, usually a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatMessage:
    """A complete choice; its fields are those of `ChatDelta`, added up."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def fold(deltas: Iterable[ChatDelta]) -> list[ChatMessage]:
    """The messages that the deltas add up to, by index."""
    index_to_deltas: dict[int, list[ChatDelta]] = {}
    for delta in deltas:
        index_to_deltas.setdefault(delta.index, []).append(delta)
    return [_fold_choice(index, index_to_deltas[index]) for index in sorted(index_to_deltas)]


def _fold_choice(index: int, deltas: Sequence[ChatDelta]) -> ChatMessage:
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return ChatMessage(
        index,
        content="".join([delta.content for delta in deltas]),
        reasoning="".join([delta.reasoning for delta in deltas]),
        tool_calls=_fold_calls([call for delta in deltas for call in delta.tool_calls]),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs or ()] if has_logprobs else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
    )


def _fold_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
    calls: dict[int, ToolCall] = {}
    index_to_pieces: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.index not in calls:
            calls[delta.index] = ToolCall(delta.id or "", delta.name or "")
        index_to_pieces.setdefault(delta.index, []).append(delta.arguments)
    for index, call in calls.items():
        call.arguments = "".join(index_to_pieces[index])
    return list(calls.values())
