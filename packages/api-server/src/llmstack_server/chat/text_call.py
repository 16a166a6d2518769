"""Reads an answer that is one call as a whole, without any form around its text."""

from __future__ import annotations

from llmstack_output_parsers import ParsedDelta, ToolCallDelta
from llmstack_output_parsers.parser import new_call_id


class TextCallParser:
    """An `OutputParser` that takes all text as the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> ParsedDelta:
        """The next part of the call."""
        return self._part(text) if text else ParsedDelta()

    def finish(self) -> ParsedDelta:
        """The call itself, where it has no text."""
        return ParsedDelta() if self._has_begun else self._part("")

    def _part(self, text: str) -> ParsedDelta:
        if self._has_begun:
            return ParsedDelta(tool_calls=(ToolCallDelta(0, None, None, text),))
        self._has_begun = True
        return ParsedDelta(tool_calls=(ToolCallDelta(0, new_call_id(), self._name, text),))
