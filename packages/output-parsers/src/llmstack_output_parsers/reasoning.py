"""Parsers of reasoning, which a model writes between tags before its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llmstack_output_parsers.parser import Parser, ToolParser
from llmstack_output_parsers.protocols import OutputParser, ParsedDelta
from llmstack_output_parsers.reader import Steps

_LINE_ENDS = "\r\n"
MAX_LINE_ENDS = 1024


class ThinkParser(Parser):
    """`<think>reasoning</think>answer`; either tag may be missing.

    White space next to the tags belongs to neither side: templates restore it.

    Attributes:
        start, end: The tags.
        other_starts, other_ends: Further spellings of them; all ends begin with the same character.
        ends_before: Texts that end the reasoning too, and belong to the answer.
        answer_tokens: Control tokens that are no content wherever they stand; each start tag among them begins
            reasoning. They begin with the same character.
        is_open_by_default: Whether the message starts with reasoning without a start tag, if the prompt shows neither.
    """

    start, end = "<think>", "</think>"
    is_open_by_default = False
    other_starts: ClassVar[Sequence[str]] = ()
    other_ends: ClassVar[Sequence[str]] = ()
    ends_before: ClassVar[Sequence[str]] = ()
    answer_tokens: Sequence[str] = ()
    kept_tokens: ClassVar[Sequence[str]] = (start, end)

    def __init__(self, *, is_open: bool | None = None) -> None:
        """`is_open`: Whether the prompt has opened the tag; False if it has closed it again, None for neither."""
        super().__init__()
        self._is_open = is_open
        self._line_ends = ""
        self._passes_line_ends = False  # too many to hold back until more text arrives

    def run(self) -> Steps[None]:
        """Reasoning first, then content."""
        if (yield from self._begins_with_reasoning()) and not (yield from self._read_reasoning()):
            yield from self.reader.take_spaces()
        yield from self._read_answer()

    def _read_answer(self) -> Steps[None]:
        while True:
            text, found = self._next_of_answer()
            self.say(text)
            if found == self.start and not (yield from self._read_reasoning()):
                yield from self.reader.take_spaces()
            if not found:
                if self.reader.is_ended:
                    return
                yield

    def _next_of_answer(self) -> tuple[str, str]:
        """Text of the answer, and the control token after it."""
        return self.reader.take_until(self.answer_tokens) if self.answer_tokens else (self.reader.take_rest(), "")

    def _begins_with_reasoning(self) -> Steps[bool]:
        if self._is_open is False:
            return False
        self.reader.hold()
        yield from self.reader.take_spaces()
        has_start = False
        for start in (self.start, *self.other_starts):
            has_start = has_start or (yield from self.reader.take_if(start))
        spaces = self.reader.release()
        is_open = has_start or (self.is_open_by_default if self._is_open is None else self._is_open)
        if not is_open:
            self.say(spaces)
        return is_open

    def _read_reasoning(self) -> Steps[bool]:
        """Passes on reasoning up to its end; True if that end belongs to the answer, which then has begun."""
        yield from self.reader.take_spaces()
        while True:
            text, found = self.reader.take_until((self.end, *self.other_ends, *self.ends_before))
            self._think_without_line_ends(text)
            if found:
                self._line_ends, self._passes_line_ends = "", False
            if found in self.ends_before and found not in self.answer_tokens:
                self.say(self.take_call(found))
                return True
            if found:
                self.end_thinking()
            if found or self.reader.is_ended:
                return found in self.ends_before
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
    kept_tokens = answer_tokens = (start, end)


class SeedOssParser(ThinkParser):
    """Reasoning between the tags of Seed-OSS."""

    start, end = "<seed:think>", "</seed:think>"
    kept_tokens = answer_tokens = (start, end)


class KimiK2Parser(DeepSeekR1Parser):
    """Reasoning of Kimi K2, which the first tool call ends as well."""

    ends_before = ("<|tool_calls_section_begin|>",)
    kept_tokens = (*DeepSeekR1Parser.kept_tokens, *ends_before)


class GlmParser(ThinkParser):
    """Reasoning of GLM 4.5 and later, which the first tool call ends as well."""

    ends_before = ("<tool_call>",)
    kept_tokens = (*ThinkParser.kept_tokens, *ends_before)


class GraniteParser(ThinkParser):
    """Reasoning of Granite 3.2, between sentences."""

    start, end = "Here is my thought process:", "Here is my response:"
    other_starts, other_ends = ("Here's my thought process:",), ("Here's my response:",)
    kept_tokens = ()


class Gemma4Parser(ThinkParser):
    """Reasoning of Gemma 4, in a channel whose name is `thought`."""

    start, end = "<|channel>", "<channel|>"
    kept_tokens = answer_tokens = (start, end)

    def _read_reasoning(self) -> Steps[bool]:
        yield from self.reader.take_spaces()
        yield from self.reader.take_if("thought\n")
        return (yield from super()._read_reasoning())


class MiniMaxM3Parser(ThinkParser):
    """Reasoning between the tags of MiniMax M3."""

    start, end = "<mm:think>", "</mm:think>"
    kept_tokens = answer_tokens = (start, end)


class InklingParser(ThinkParser):
    """Reasoning of Inkling, in a block of its own; the tokens around the answer are no content."""

    start, end = "<|content_thinking|>", "<|end_message|>"
    _text, _call = "<|content_text|>", "<|content_invoke_tool_json|>"
    ends_before = (_text, _call)
    answer_tokens: Sequence[str] = (start, end, _text)
    kept_tokens = (*answer_tokens, _call)

    def expect_calls(self, starts: Sequence[str]) -> None:
        """Leaves the tokens of the answer to the parser of calls, whose values may hold them."""
        super().expect_calls(starts)
        if self._call in starts:
            self.answer_tokens = (self.start,)


class HunyuanParser(ThinkParser):
    """Reasoning of Hunyuan A13B, whose answer has tags as well."""

    _answer, _answer_end = "<answer>", "</answer>"
    kept_tokens = (*ThinkParser.kept_tokens, _answer, _answer_end)

    def _read_answer(self) -> Steps[None]:
        self.reader.hold()
        yield from self.reader.take_spaces()
        has_tag = yield from self.reader.take_if(self._answer)
        held = self.reader.release()
        if has_tag:
            yield from self.reader.take_spaces()
            while True:
                text, found = self.reader.take_until((f"\n{self._answer_end}",))
                self.say(text)
                if found or self.reader.is_ended:
                    break
                yield
        else:
            self.say(held)
        yield from super()._read_answer()


class Ernie45Parser(HunyuanParser):
    """Reasoning of ERNIE 4.5, whose prompt opens it and whose answer has tags."""

    is_open_by_default = True
    _answer, _answer_end = "<response>", "</response>"
    kept_tokens = (*ThinkParser.kept_tokens, _answer, _answer_end)


class KeptThinkParser(ThinkParser):
    """Reasoning that stays in the content, as MiniMax M2 expects it back, with the tag that the prompt has opened."""

    def run(self) -> Steps[None]:
        """The tag, and all text."""
        if self._is_open is not False:
            self.say(self.start)
        yield from self._read_answer()


class ChainedParser:
    """Two parsers in sequence: the second parses the content that the first returns.

    A call inside reasoning that is never closed is a call: the text from its start on is held until that is known.
    """

    def __init__(self, first: OutputParser, second: OutputParser) -> None:
        self._first = first
        self._second = second
        if isinstance(first, Parser):
            first.expect_calls(second.starts if isinstance(second, ToolParser) else ())

    def feed(self, text: str) -> ParsedDelta:
        delta = self._first.feed(text)
        return self._second_of(delta) if delta.content else delta

    def finish(self) -> ParsedDelta:
        delta = self._first.finish()
        if isinstance(self._first, Parser) and isinstance(self._second, ToolParser):
            held = self._first.take_unclosed()
            if held and self._second.has_call(held):
                delta.content += held
            else:
                delta.reasoning += held
        delta = self._second_of(delta)
        rest = self._second.finish()
        return ParsedDelta(
            delta.content + rest.content, delta.reasoning + rest.reasoning, (*delta.tool_calls, *rest.tool_calls)
        )

    def _second_of(self, delta: ParsedDelta) -> ParsedDelta:
        parsed = self._second.feed(delta.content)
        return ParsedDelta(parsed.content, delta.reasoning + parsed.reasoning, parsed.tool_calls)
