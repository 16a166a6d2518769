"""Reasoning before an answer: what stands between think tags."""

from __future__ import annotations

from llmstack_output_parsers.parser import Parser
from llmstack_output_parsers.reader import Steps

_LINE_ENDS = "\r\n"
MAX_LINE_ENDS = 1024


class ThinkParser(Parser):
    """`<think>reasoning</think>answer`; either tag may be missing.

    White space beside the tags belongs to neither side: templates put it back.

    Attributes:
        start, end: The tags.
        is_open_by_default: What to believe where the prompt does not tell: that the model thinks without having
            written the first tag.
    """

    start, end = "<think>", "</think>"
    is_open_by_default = False
    kept_tokens = (start, end)

    def __init__(self, *, is_open: bool | None = None) -> None:
        """`is_open`: Whether the prompt has opened the tag; False where it has closed it again, None for neither."""
        super().__init__()
        self._is_open = is_open
        self._line_ends = ""
        self._passes_line_ends = False  # there were too many of them to wait for the end of

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
            self._think_but_line_ends(text)
            if found or self.reader.is_ended:
                return
            yield

    def _think_but_line_ends(self, text: str) -> None:
        """Passes on the reasoning except for the line ends it closes with, which wait for more to come."""
        kept = text.rstrip(_LINE_ENDS)
        if kept:
            self.think(self._line_ends + kept)
            self._line_ends, self._passes_line_ends = "", False
        self._line_ends += text[len(kept) :]
        if self._passes_line_ends or len(self._line_ends) > MAX_LINE_ENDS:
            self.think(self._line_ends)
            self._line_ends, self._passes_line_ends = "", True


class DeepSeekR1Parser(ThinkParser):
    """The same for models that think from the first token, whatever the prompt ends with."""

    is_open_by_default = True


class MistralReasoningParser(ThinkParser):
    """Mistral's tags."""

    start, end = "[THINK]", "[/THINK]"
    kept_tokens = (start, end)
