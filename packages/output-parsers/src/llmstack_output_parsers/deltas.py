"""What a parser makes of a piece of model output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new in one tool call.

    Attributes:
        index: Which call of the message, from 0.
        id: Set in the first delta of a call only.
        name: Of the function; set in the first delta of a call only.
        arguments: The next piece of the arguments' JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedDelta:
    """What is new in a message; all of it empty where a parser has to see more first."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
