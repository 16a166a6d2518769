"""The protocol of parsers, and the deltas that they return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of one tool call.

    Attributes:
        index: Number of the call in the message, from 0.
        id: Set in the first delta of a call only.
        name: The name of the function; set in the first delta of a call only.
        arguments: The next part of the arguments' JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ParsedDelta:
    """The next part of a message; empty while a parser needs more text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class OutputParser(Protocol):
    """Parses the growing text of one message. It raises for no text.

    The sum of the deltas is the same for any division of the text into pieces.
    """

    def feed(self, text: str) -> ParsedDelta:
        """The part of the message that this piece decides, in time linear in its length, amortised."""
        ...

    def finish(self) -> ParsedDelta:
        """The text that was held back. To be called once, after the last piece."""
        ...
