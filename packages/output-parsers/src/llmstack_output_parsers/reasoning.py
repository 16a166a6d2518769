"""Parsers of reasoning, which a model writes between tags before its answer."""

from __future__ import annotations

from llmstack_output_parsers.parser import Parser
from llmstack_output_parsers.protocols import OutputParser, ParsedDelta
from llmstack_output_parsers.reader import Steps

_LINE_ENDS = "\r\n"
MAX_LINE_ENDS = 1024


class ThinkParser(Parser):
    """`<think>reasoning</think>answer`; either tag may be missing.

    White space next to the tags belongs to neither side: templates restore it.

    Attributes:
        start, end: The tags.
        is_open_by_default: Whether the message starts with reasoning without a start tag, if the prompt shows neither.
    """

    start, end = "<think>", "</think>"
    is_open_by_default = False
    kept_tokens = (start, end)

    def __init__(self, *, is_open: bool | None = None) -> None:
        """`is_open`: Whether the prompt has opened the tag; False if it has closed it again, None for neither."""
        super().__init__()
        self._is_open = is_open
        self._line_ends = ""
        self._passes_line_ends = False  # too many to hold back until more text arrives

    def run(self) -> Steps[None]:
        """Reasoning first, then content."""
        if (yield from self._begins_with_reasoning()):
            yield from self._read_reasoning()
            yield from self.reader.take_spaces()
        while not self.reader.is_ended:
            self.say(self.reader.take_rest())
            yield
        self.say(self.reader.take_rest())

    def _begins_with_reasoning(self) -> Steps[bool]:
        if self._is_open is False:
            return False
        self.reader.hold()
        yield from self.reader.take_spaces()
        has_start = yield from self.reader.take_if(self.start)
        spaces = self.reader.release()
        is_open = has_start or (self.is_open_by_default if self._is_open is None else self._is_open)
        if not is_open:
            self.say(spaces)
        return is_open

    def _read_reasoning(self) -> Steps[None]:
        yield from self.reader.take_spaces()
        while True:
            text, found = self.reader.take_until((self.end,))
            self._think_without_line_ends(text)
            if found or self.reader.is_ended:
                return
            yield

    def _think_without_line_ends(self, text: str) -> None:
        """Passes on reasoning, except for its last line ends, which are held until more reasoning arrives."""
        kept = text.rstrip(_LINE_ENDS)
        if kept:
            self.think(self._line_ends + kept)
            self._line_ends, self._passes_line_ends = "", False
        self._line_ends += text[len(kept) :]
        if self._passes_line_ends or len(self._line_ends) > MAX_LINE_ENDS:
            self.think(self._line_ends)
            self._line_ends, self._passes_line_ends = "", True


class DeepSeekR1Parser(ThinkParser):
    """Reasoning of models that think from the first token, for any end of the prompt."""

    is_open_by_default = True


class MistralReasoningParser(ThinkParser):
    """Reasoning between the tags of Mistral's models."""

    start, end = "[THINK]", "[/THINK]"
    kept_tokens = (start, end)


class ChainedParser:
    """Two parsers in sequence: the second parses the content that the first returns."""

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> ParsedDelta:
        delta = self._first.feed(text)
        return self._second_of(delta) if delta.content else delta

    def finish(self) -> ParsedDelta:
        delta = self._second_of(self._first.finish())
        rest = self._second.finish()
        return ParsedDelta(
            delta.content + rest.content, delta.reasoning + rest.reasoning, (*delta.tool_calls, *rest.tool_calls)
        )

    def _second_of(self, delta: ParsedDelta) -> ParsedDelta:
        parsed = self._second.feed(delta.content)
        return ParsedDelta(parsed.content, delta.reasoning + parsed.reasoning, parsed.tool_calls)
