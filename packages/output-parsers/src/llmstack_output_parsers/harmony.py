"""Messages of gpt-oss: channels for reasoning, tool calls and the answer."""

from __future__ import annotations

import string
from collections.abc import Sequence

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS, JsonCallParser
from llmstack_output_parsers.json_scanner import JsonScanner
from llmstack_output_parsers.parser import Parser
from llmstack_output_parsers.reader import Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
MAX_HEADER_CHARS = 512
_MARKS = (START, CHANNEL)
_FUNCTIONS = "to=functions."
_HEADERS = (*_MARKS, _FUNCTIONS)  # the last at the start of the text alone
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.=: ")
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")
_WORDS_AFTER = {START: ("assistant",), CHANNEL: ("analysis", "commentary", "final"), CONSTRAIN: ("json", "code")}


class _Header:
    """The text from a message's first token to `<|message|>`.

    Attributes:
        function: The function that the recipient names, whatever the channel; empty for other messages.
        is_bare: It has no token at all, so it is a header only if a call follows.
        is_cut: The text ends with it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.is_cut = False
        self.is_bare = text.startswith(_FUNCTIONS) and "<|" not in text
        self.is_analysis = f"{CHANNEL}analysis" in text
        _, found, rest = text.partition(_FUNCTIONS)
        end = next((index for index, character in enumerate(rest) if character not in _NAME_CHARACTERS), len(rest))
        self.function = rest[: min(end, MAX_NAME_CHARS)] if found else ""

    def body(self) -> str:
        """The start of the message, where `<|message|>` is missing."""
        token = max(TOKENS, key=self.text.rfind)
        rest = self.text.rpartition(token)[2]
        words = _WORDS_AFTER.get(token, ())
        body = next((rest.removeprefix(word) for word in words if rest.startswith(word)), rest).lstrip(" ")
        is_header = "to=".startswith(body[:3]) or any(word.startswith(body) for word in words)
        return "" if self.is_cut and is_header else body


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
    header = _Header(text)
    if reader.ends_within(TOKENS) and not header.is_bare:
        header.is_cut = True
        reader.take_rest()
    return header


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
        self._passes_calls = False

    def expect_calls(self, starts: Sequence[str]) -> None:
        """Leaves messages to functions to the parser that knows their headers."""
        super().expect_calls(starts)
        self._passes_calls = CHANNEL in starts

    def run(self) -> Steps[None]:
        """Parses messages in any order; text outside of them is content."""
        marker = ""
        if self._is_open:
            marker = yield from self._pass(is_reasoning=True)
        else:
            marker = yield from _begin_header(self)
        while True:
            if marker not in _HEADERS:
                marker = yield from self._pass(is_reasoning=False)
            if not marker:
                return
            if marker in _HEADERS:
                marker = yield from self._read_message((yield from _read_header(self, marker)))

    def _read_message(self, header: _Header) -> Steps[str]:
        """Passes on the message after a header, and returns the token after it."""
        if header.function and (self._passes_calls or header.is_bare):
            self.say(header.text)
            yield from self._pass_object()
            marker = yield from self._pass(is_reasoning=False)
            self.say(marker if marker in (END, CALL) and self._passes_calls else "")
            return marker
        is_reasoning = header.is_analysis and not header.function
        (self.think if is_reasoning else self.say)(header.body())
        return (yield from self._pass(is_reasoning=is_reasoning))

    def _pass(self, *, is_reasoning: bool) -> Steps[str]:
        """Passes on text up to the end of the message, and returns the token there; empty at the end of the text."""
        while True:
            text, marker = self.reader.take_until(TOKENS)
            if text:
                (self.think if is_reasoning else self.say)(text)
            if marker and is_reasoning and marker not in (MESSAGE, CONSTRAIN):
                self.end_thinking()
            if self.reader.is_at_end or marker not in ("", MESSAGE, CONSTRAIN):
                return marker
            if not marker:
                yield

    def _pass_object(self) -> Steps[None]:
        """Passes on the arguments of a call, whose strings may hold tokens."""
        if (yield from self.reader.peek()) != "{":
            return
        scanner = JsonScanner()
        while not self.reader.is_ended or not self.reader.is_at_end:
            self.say(self.reader.take_json_piece(scanner))
            if scanner.is_complete or scanner.is_broken:
                return
            if not self.reader.is_ended:
                yield


class HarmonyToolParser(JsonCallParser):
    """Calls as messages: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.

    The recipient makes a message a call, whatever its channel. The text of other messages is content.
    """

    kept_tokens = TOKENS
    starts = _MARKS

    def run(self) -> Steps[None]:
        """Parses messages in any order."""
        before = yield from _begin_header(self)
        while before or (before := (yield from self.say_until(_MARKS))):
            header = yield from _read_header(self, before)
            before = ""
            if header.function:
                yield from self._read_call(header)
            else:
                self.say(header.body())

    def _read_call(self, header: _Header) -> Steps[None]:
        self.reader.hold()
        yield from self.reader.take_spaces()
        has_begun = yield from self.pass_arguments(header.function)
        held = self.reader.release()
        if not has_begun:
            is_cut = self.reader.is_ended and not header.is_bare
            self.say("" if is_cut else header.text + held if header.is_bare else held)
            return
        yield from self.reader.take_spaces()
        yield from self.reader.take_if(CALL)
