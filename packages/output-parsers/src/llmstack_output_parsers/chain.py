"""Reasoning first, and what remains goes to the parser of tool calls."""

from __future__ import annotations

from llmstack_output_parsers.deltas import ParsedDelta
from llmstack_output_parsers.protocols import OutputParser


class ChainedParser:
    """Two parsers one after the other: the second reads the content that the first gives."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> ParsedDelta:
        """As `OutputParser.feed`."""
        delta = self._first.feed(text)
        return self._second_of(delta) if delta.content else delta

    def finish(self) -> ParsedDelta:
        """As `OutputParser.finish`."""
        delta = self._second_of(self._first.finish())
        rest = self._second.finish()
        return ParsedDelta(
            delta.content + rest.content, delta.reasoning + rest.reasoning, (*delta.tool_calls, *rest.tool_calls)
        )

    def _second_of(self, delta: ParsedDelta) -> ParsedDelta:
        parsed = self._second.feed(delta.content)
        return ParsedDelta(parsed.content, delta.reasoning + parsed.reasoning, parsed.tool_calls)
