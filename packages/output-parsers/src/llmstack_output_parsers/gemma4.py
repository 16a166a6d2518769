"""Tool calls of Gemma 4: bare keys, and strings between delimiters of their own."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import ClassVar

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS
from llmstack_output_parsers.parser import ToolParser
from llmstack_output_parsers.reader import SPACES, Steps, without_cut_tag
from llmstack_output_parsers.schema_values import Schemas, json_text

CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_DEPTH = 32
MAX_BARE_CHARS = 4096
MAX_GAP_CHARS = 256
_SPACES = frozenset(SPACES)
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")
_KEY_CHARACTERS = frozenset(string.printable) - frozenset('{}[]<>,:"')
_BARE_CHARACTERS = frozenset(string.printable) - frozenset("{}[]<>,")
_JSON_TYPES = {"type": ["number", "boolean"]}


class Gemma4ToolParser(ToolParser):
    """`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:42}<tool_call|>`.

    Strings are passed on while they arrive. Malformed arguments end at the error, and the rest is content.

    Attributes:
        call, call_end: The tokens around a call.
        quote: The token on both sides of a string.
    """

    call, call_end, quote = CALL, CALL_END, QUOTE
    kept_tokens: ClassVar[Sequence[str]] = (call, call_end, quote)

    @property
    def starts(self) -> Sequence[str]:
        """The token before a call."""
        return (self.call,)

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until(self.starts)):
            self.reader.hold()
            yield from self.reader.take_spaces()
            yield from self.reader.take_if("call:")
            name = yield from self.reader.take_while(_NAME_CHARACTERS, MAX_NAME_CHARS)
            is_call = bool(name) and (yield from self.reader.peek()) == "{"
            held = self.reader.release()
            if not is_call:
                self.say_refused(before + held)
                continue
            self.begin_call(name)
            if (yield from self._pass_object(MAX_DEPTH)):
                yield from self.reader.take_spaces()
                yield from self.reader.take_if(self.call_end)

    def _pass_object(self, max_depth: int) -> Steps[bool]:
        """Writes an object as JSON; False if it is malformed or incomplete."""
        self.reader.take(1)
        self.add_arguments("{")
        separator = ""
        while (yield from self.reader.take_spaces()) != "}":
            key = yield from self._read_key()
            if key is None:
                return False
            self.add_arguments(f"{separator}{json_text(key)}: ")
            if not (yield from self._pass_value(max_depth)) or not (yield from self.reader.take_comma("}")):
                return False
            separator = ", "
        self.reader.take(1)
        self.add_arguments("}")
        return True

    def _pass_list(self, max_depth: int) -> Steps[bool]:
        self.reader.take(1)
        self.add_arguments("[")
        separator = ""
        while (yield from self.reader.take_spaces()) != "]":
            self.add_arguments(separator)
            if not (yield from self._pass_value(max_depth)) or not (yield from self.reader.take_comma("]")):
                return False
            separator = ", "
        self.reader.take(1)
        self.add_arguments("]")
        return True

    def _read_key(self) -> Steps[str | None]:
        """The next key, its colon taken; None if there is none."""
        is_quoted = yield from self.reader.take_if(self.quote)
        key = yield from self.reader.take_while(_KEY_CHARACTERS, MAX_NAME_CHARS)
        if is_quoted and not (yield from self.reader.take_if(self.quote)):
            return None
        yield from self.reader.take_spaces()
        return key.strip() if key.strip() and (yield from self.reader.take_if(":")) else None

    def _pass_value(self, max_depth: int) -> Steps[bool]:
        character = yield from self.reader.take_spaces()
        if character == "{" and max_depth:
            return (yield from self._pass_object(max_depth - 1))
        if character == "[" and max_depth:
            return (yield from self._pass_list(max_depth - 1))
        if character == "<":
            return (yield from self._pass_string())
        bare = yield from self.reader.take_while(_BARE_CHARACTERS, MAX_BARE_CHARS)
        if not bare.strip() or not (yield from self.reader.peek()):
            return False
        self.add_arguments(Schemas(None).converted(bare.strip(), _JSON_TYPES))
        return True

    def _pass_string(self) -> Steps[bool]:
        if not (yield from self.reader.take_if(self.quote)):
            return False
        self.add_arguments('"')
        while True:
            text, marker = self.reader.take_until((self.quote,))
            if not marker and self.reader.is_ended:
                text = without_cut_tag(text, (self.quote,))
            is_end = bool(marker) and (yield from self.reader.look_ahead(self._goes_on()))
            self.add_arguments(json_text(text if is_end else text + marker)[1:-1])
            if is_end:
                self.add_arguments('"')
            if is_end or self.reader.is_at_end:
                return is_end
            if not marker:
                yield

    def _goes_on(self) -> Steps[bool]:
        """Whether the text after a quote is what may follow a string; otherwise the quote is part of the string."""
        yield from self.reader.take_while(_SPACES, MAX_GAP_CHARS)
        return (yield from self.reader.peek()) in ("", ",", "}", "]")


class FunctionGemmaToolParser(Gemma4ToolParser):
    """Calls of FunctionGemma, as `<start_function_call>call:NAME{key:<escape>text<escape>}<end_function_call>`."""

    call, call_end, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    kept_tokens = (call, call_end, quote)
