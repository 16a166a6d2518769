"""Tool calls of Qwen 3 Coder: tags around parameters, values as bare text."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS
from llmstack_output_parsers.json_formats import TOOL_CALL, TOOL_CALL_END
from llmstack_output_parsers.parser import ToolParser
from llmstack_output_parsers.reader import MAX_HELD_CHARS, Steps
from llmstack_output_parsers.schema_values import converted, is_string, json_text, property_schema

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (PARAMETER_END, PARAMETER, FUNCTION_END, TOOL_CALL_END)
_NAME_CHARACTERS = frozenset(string.printable) - frozenset("<>\r\n\x0b\x0c")


class Qwen3CoderToolParser(ToolParser):
    """Calls as `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`.

    The arguments become a JSON object. Strings are passed on while they arrive. Other values, by the function's schema,
    are converted when they are complete. Models omit tags: the next valid one is accepted.
    """

    kept_tokens = (TOOL_CALL, TOOL_CALL_END)

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until((TOOL_CALL, FUNCTION))):
            if before == TOOL_CALL:
                before = yield from self._read_opening(before)
            if before.endswith(FUNCTION):
                yield from self._read_function(before)

    def _read_opening(self, before: str) -> Steps[str]:
        """The text before the function's name; it is content if no function follows."""
        self.reader.hold()
        yield from self.reader.take_spaces()
        has_function = yield from self.reader.take_if(FUNCTION)
        before += self.reader.release()
        if not has_function:
            self.say(before)
        return before if has_function else ""

    def _read_function(self, before: str) -> Steps[None]:
        self.reader.hold()
        name = yield from self.reader.take_while(_NAME_CHARACTERS, MAX_NAME_CHARS)
        is_closed = yield from self.reader.take_if(">")
        held = self.reader.release()
        if not is_closed or not name.strip():
            self.say(before + held)
            return
        self.begin_call(name.strip())
        self.add_arguments("{")
        if (yield from self._read_parameters(self.tools.get(name.strip()))):
            self.add_arguments("}")
        yield from self.reader.take_spaces()
        yield from self.reader.take_if(TOOL_CALL_END)

    def _read_parameters(self, parameters: Mapping[str, Any] | None) -> Steps[bool]:
        """Up to the end of the function; False if the text, and the arguments with it, ends before."""
        marker = yield from self._skip_to_tag()
        num_read = 0
        while marker == PARAMETER:
            key = yield from self.reader.take_while(_NAME_CHARACTERS, MAX_NAME_CHARS)
            if not (yield from self.reader.take_if(">")):
                return not self.reader.is_ended
            self.add_arguments(f"{', ' if num_read else ''}{json_text(key.strip())}: ")
            num_read += 1
            marker = yield from self._read_value(property_schema(parameters, key.strip()))
            if marker == PARAMETER_END:
                marker = yield from self._skip_to_tag()
        return bool(marker)

    def _skip_to_tag(self) -> Steps[str]:
        """The next tag between parameters; empty at the end of the text. Text between them has no meaning."""
        character = yield from self.reader.take_spaces()
        for tag in (PARAMETER, FUNCTION_END, TOOL_CALL_END):
            if character == "<" and (yield from self.reader.take_if(tag)):
                return tag
        return "" if self.reader.is_ended and not character else FUNCTION_END

    def _read_value(self, schema: Mapping[str, Any]) -> Steps[str]:
        """Passes on one value and returns the tag after it; empty at the end of the text."""
        if (yield from self.reader.peek()) == "\n":
            self.reader.take(1)
        return (yield from self._pass_string() if is_string(schema) else self._read_converted(schema))

    def _pass_string(self, pending: str = "") -> Steps[str]:
        """`pending`: Text of the value that was read before. The last line end belongs to the tag."""
        self.add_arguments('"')
        while True:
            text, marker = self.reader.take_until(_VALUE_ENDS)
            text = pending + text
            pending = "\n" if text.endswith("\n") else ""
            self.add_arguments(json_text(text.removesuffix("\n"))[1:-1])
            if marker:
                self.add_arguments('"')
            if marker or self.reader.is_ended:
                return marker
            yield

    def _read_converted(self, schema: Mapping[str, Any]) -> Steps[str]:
        """Converts a value; one that is too long to be held is a string."""
        pieces: list[str] = []
        num_chars = 0
        while True:
            text, marker = self.reader.take_until(_VALUE_ENDS)
            pieces.append(text)
            num_chars += len(text)
            if num_chars > MAX_HELD_CHARS and not marker:
                return (yield from self._pass_string("".join(pieces)))
            if marker:
                value = "".join(pieces).removesuffix("\n")
                self.add_arguments(json_text(value) if num_chars > MAX_HELD_CHARS else converted(value, schema))
            if marker or self.reader.is_ended:
                return marker
            yield
