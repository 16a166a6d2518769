"""Messages of gpt-oss: channels for reasoning, tool calls and the answer."""

from __future__ import annotations

import string

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS, JsonCallParser
from llmstack_output_parsers.parser import Parser
from llmstack_output_parsers.reader import Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
MAX_HEADER_CHARS = 512
_ENDS = (END, CALL, RETURN, START, CHANNEL)
_FUNCTIONS = "to=functions."
_HEADERS = (START, CHANNEL, _FUNCTIONS)  # the last at the start of the text alone
_MARKS = (START, CHANNEL)
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.=: ")
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")


class _Header:
    """The text from a message's first token to `<|message|>`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_complete = text.endswith(MESSAGE)
        self.is_analysis = f"{CHANNEL}analysis" in text
        _, found, rest = text.partition(_FUNCTIONS)
        end = next((index for index, character in enumerate(rest) if character not in _NAME_CHARACTERS), len(rest))
        self.function = rest[: min(end, MAX_NAME_CHARS)] if found else ""


def _read_header(parser: Parser, first: str) -> Steps[_Header]:
    """The rest of a header whose first token was taken."""
    reader = parser.reader
    reader.hold()
    text = first
    while not text.endswith(MESSAGE) and len(text) < MAX_HEADER_CHARS:
        text += yield from reader.take_while(_WORD_CHARACTERS, MAX_HEADER_CHARS)
        for token in (MESSAGE, CHANNEL, CONSTRAIN):
            if (yield from reader.take_if(token)):
                text += token
                break
        else:
            break
    reader.release()
    return _Header(text)


def _begin_header(parser: Parser) -> Steps[str]:
    """A recipient at the start of the text, since the prompt ends within the first header; empty for none."""
    reader = parser.reader
    reader.hold()
    yield from reader.take_spaces()
    has_recipient = yield from reader.take_if(_FUNCTIONS)
    held = reader.release()
    if has_recipient:
        return _FUNCTIONS
    parser.say(held)
    return ""


class HarmonyReasoningParser(Parser):
    """Reasoning is what stands in the channel `analysis`; messages to functions pass as they are, others as content.

    Attributes:
        start, end: The texts around reasoning.
    """

    start, end = f"{CHANNEL}analysis{MESSAGE}", END
    kept_tokens = TOKENS

    def __init__(self, *, is_open: bool | None = None) -> None:
        """`is_open`: Whether the prompt ends inside reasoning."""
        super().__init__()
        self._is_open = bool(is_open)

    def run(self) -> Steps[None]:
        """Parses messages in any order; text outside of them is content."""
        marker = ""
        if self._is_open:
            marker = yield from self._pass(is_reasoning=True, ends=_ENDS)
        else:
            marker = yield from _begin_header(self)
        while True:
            if marker not in _HEADERS:
                marker = yield from self._pass(is_reasoning=False, ends=_MARKS)
            if not marker:
                return
            header = yield from _read_header(self, marker)
            marker = ""
            if not header.is_complete:
                self.say(header.text)
            elif header.function and not header.is_analysis:
                self.say(header.text)
                marker = yield from self._pass(is_reasoning=False, ends=_ENDS)
                self.say(marker if marker in (END, CALL) else "")
            else:
                marker = yield from self._pass(is_reasoning=header.is_analysis, ends=_ENDS)

    def _pass(self, *, is_reasoning: bool, ends: tuple[str, ...]) -> Steps[str]:
        """Passes on text up to one of the ends, and returns it; empty at the end of the text."""
        while True:
            text, marker = self.reader.take_until(ends)
            if text:
                (self.think if is_reasoning else self.say)(text)
            if marker or self.reader.is_ended:
                return marker
            yield


class HarmonyToolParser(JsonCallParser):
    """Calls as messages: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    The text of other messages is content.
    """

    kept_tokens = TOKENS

    def run(self) -> Steps[None]:
        """Parses messages in any order."""
        before = yield from _begin_header(self)
        while before or (before := (yield from self.say_until(_ENDS))):
            if before not in _HEADERS:
                before = ""
                continue
            header = yield from _read_header(self, before)
            before = ""
            if not header.is_complete:
                self.say(header.text)
            elif header.function and not header.is_analysis:
                yield from self._read_call(header)

    def _read_call(self, header: _Header) -> Steps[None]:
        self.reader.hold()
        yield from self.reader.take_spaces()
        has_begun = yield from self.pass_arguments(header.function)
        held = self.reader.release()
        if not has_begun:
            self.say(header.text + held)
            return
        yield from self.reader.take_spaces()
        yield from self.reader.take_if(CALL)
