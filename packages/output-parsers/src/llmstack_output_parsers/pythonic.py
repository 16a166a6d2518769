"""Tool calls as a list of Python calls, converted to JSON while they arrive."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS
from llmstack_output_parsers.parser import ToolParser
from llmstack_output_parsers.reader import Steps
from llmstack_output_parsers.schema_values import json_text

START, END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 32
MAX_NUMBER_CHARS = 64
_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_")
_NAME_CHARACTERS = _WORD_CHARACTERS | frozenset(".-")
_NUMBER_CHARACTERS = frozenset(string.hexdigits + "+-._xXoO")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"[": "]", "(": ")"}


class PythonicToolParser(ToolParser):
    """`[name(key=value, ...), ...]` at the start of the message, as Llama 3.2 and Llama 4 write calls.

    A call begins with its first `key=`; a list whose first name is not a known function is content. Malformed
    arguments end at the error, and the rest is content.
    """

    kept_tokens = (START, END)
    starts: Sequence[str] = (START,)

    def run(self) -> Steps[None]:
        """Parses calls first, then content."""
        self.reader.hold()
        yield from self.reader.take_spaces()
        yield from self.reader.take_if(START)
        if (yield from self.read_list("")):
            yield from self.reader.take_if(END)
        yield from self.say_until(())

    def read_list(self, before: str) -> Steps[int]:
        """Parses the next list of calls, while text is held, and returns their number; other text is content.

        `before`: Content as well, if there is no call.
        """
        yield from self.reader.take_spaces()
        yield from self.reader.take_if("[")
        num_read = 0
        while (yield from self._read_call()):
            num_read += 1
            if (yield from self.reader.take_spaces()) != ",":
                break
            self.reader.hold()
            self.reader.take(1)
        held = self.reader.release()
        self.say_refused(held if num_read else before + held)
        if num_read:
            yield from self.reader.take_if("]")
        return num_read

    def _read_call(self) -> Steps[bool]:
        """Parses one call; False if there is none, or if it is incomplete."""
        yield from self.reader.take_spaces()
        name = yield from self.reader.take_while(_NAME_CHARACTERS, MAX_NAME_CHARS)
        if name not in self.tools or not (yield from self.reader.take_if("(")):
            return False
        key = yield from self._read_key()
        if key is None:
            return False
        self.reader.release()
        self.begin_call(name)
        self.add_arguments("{")
        while key:
            self.add_arguments(f"{json_text(key)}: ")
            if not (yield from self._pass_value(MAX_DEPTH)):
                return False
            character = yield from self.reader.take_spaces()
            if character == ",":
                self.reader.take(1)
            key = yield from self._read_key()
            if key is None:
                return False
            self.add_arguments(", " if key else "")
        self.add_arguments("}")
        return True

    def _read_key(self) -> Steps[str | None]:
        """The next keyword, its `=` taken; empty at the end of the call, None if it is malformed."""
        character = yield from self.reader.take_spaces()
        if character == ")":
            self.reader.take(1)
            return ""
        key = yield from self.reader.take_while(_WORD_CHARACTERS, MAX_NAME_CHARS)
        character = yield from self.reader.take_spaces()
        if not key or character != "=":
            return None
        self.reader.take(1)
        return key

    def _pass_value(self, max_depth: int) -> Steps[bool]:
        """Writes one value as JSON; False if it is malformed."""
        character = yield from self.reader.take_spaces()
        if character in ("'", '"'):
            return (yield from self._pass_string())
        if character in _CLOSERS and max_depth:
            return (yield from self._pass_list(_CLOSERS[character], max_depth - 1))
        if character == "{" and max_depth:
            return (yield from self._pass_dict(max_depth - 1))
        if character in _NUMBER_CHARACTERS and character not in string.ascii_letters:
            return (yield from self._pass_number())
        word = yield from self.reader.take_while(_WORD_CHARACTERS, MAX_NAME_CHARS)
        self.add_arguments(_WORDS.get(word, ""))
        return word in _WORDS

    def _pass_number(self) -> Steps[bool]:
        text = yield from self.reader.take_while(_NUMBER_CHARACTERS, MAX_NUMBER_CHARS)
        number = _number(text)
        self.add_arguments("" if number is None else number)
        return number is not None

    def _pass_list(self, closer: str, max_depth: int) -> Steps[bool]:
        self.reader.take(1)
        self.add_arguments("[")
        separator = ""
        while (character := (yield from self.reader.take_spaces())) != closer:
            self.add_arguments(separator)
            if not character or not (yield from self._pass_value(max_depth)):
                return False
            separator = ", "
            if not (yield from self.reader.take_comma(closer)):
                return False
        self.reader.take(1)
        self.add_arguments("]")
        return True

    def _pass_dict(self, max_depth: int) -> Steps[bool]:
        self.reader.take(1)
        self.add_arguments("{")
        separator = ""
        while (character := (yield from self.reader.take_spaces())) != "}":
            self.add_arguments(separator)
            if character not in ("'", '"') or not (yield from self._pass_string()):
                return False
            if (yield from self.reader.take_spaces()) != ":":
                return False
            self.reader.take(1)
            self.add_arguments(": ")
            if not (yield from self._pass_value(max_depth)):
                return False
            separator = ", "
            if not (yield from self.reader.take_comma("}")):
                return False
        self.add_arguments(self.reader.take(1))
        return True

    def _pass_string(self) -> Steps[bool]:
        quote = self.reader.take(1)
        self.add_arguments('"')
        while True:
            text, marker = self.reader.take_until_character(quote + "\\")
            self.add_arguments(json_text(text)[1:-1])
            if marker == quote:
                self.add_arguments('"')
                return True
            if marker:
                self.add_arguments(json_text((yield from self._read_escape()))[1:-1])
            elif self.reader.is_ended:
                return False
            else:
                yield

    def _read_escape(self) -> Steps[str]:
        """The text that an escape sequence stands for; its backslash was read already."""
        character = yield from self.reader.peek()
        if not character:
            return ""
        self.reader.take(1)
        if character in _HEX_LENGTHS:
            digits = yield from self.reader.take_while(_HEX_DIGITS, _HEX_LENGTHS[character])
            return _character(digits) if len(digits) == _HEX_LENGTHS[character] else f"\\{character}{digits}"
        known = _ESCAPES.get(character)
        if known is not None:
            return known
        return character if character in "'\"\\" else f"\\{character}"


class Lfm2ToolParser(PythonicToolParser):
    """The same list between `<|tool_call_start|>` and `<|tool_call_end|>`, anywhere in the message.

    Attributes:
        closings: Texts that may stand after a list.
    """

    kept_tokens = ("<|tool_call_start|>", "<|tool_call_end|>")
    starts = (kept_tokens[0],)
    closings: Sequence[str] = (kept_tokens[1],)

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until(self.starts)):
            self.reader.hold()
            if (yield from self.read_list(before)):
                yield from self.reader.take_spaces()
                for closing in self.closings:
                    yield from self.reader.take_if(closing)


class Olmo3ToolParser(PythonicToolParser):
    """Calls of Olmo 3, one in each line between `<function_calls>` and `</function_calls>`."""

    kept_tokens = ("<function_calls>", "</function_calls>")
    starts = (kept_tokens[0],)

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until(self.starts)):
            self.reader.hold()
            num_read = 0
            while (yield from self._read_call()):
                num_read += 1
                if (yield from self.reader.take_spaces()) in ("", "<"):
                    break
                self.reader.hold()
            held = self.reader.release()
            self.say_refused(held if num_read else before + held)
            if num_read:
                yield from self.reader.take_if("</function_calls>")


_HEX_DIGITS = frozenset(string.hexdigits)


def _character(digits: str) -> str:
    code = int(digits, 16)
    is_character = code < 0x110000 and not 0xD800 <= code < 0xE000
    return chr(code) if is_character else "\ufffd"


def _number(text: str) -> str | None:
    """The number in JSON; None if the text is not a number."""
    try:
        return json.dumps(int(text, 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError:
        return None
