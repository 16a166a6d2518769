"""Tool calls of MiniMax M3: elements named after arguments, which may nest."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS
from llmstack_output_parsers.reader import MAX_HELD_CHARS, Steps
from llmstack_output_parsers.schema_values import converted, json_text, property_schema, types_of
from llmstack_output_parsers.tagged_calls import TaggedToolParser

NAMESPACE = "]<]minimax[>["
MAX_DEPTH = 32
_ELEMENT_CHARACTERS = frozenset(string.printable) - frozenset("<>/[]\r\n\x0b\x0c")


class MiniMaxM3ToolParser(TaggedToolParser):
    """`<invoke name="NAME"><key>value</key>...</invoke>`, with a marker before each tag.

    Elements inside an element make an object, or an array where the schema says so or they are named `item`. Strings of
    the schema are passed on while they arrive. Malformed arguments end at the error.
    """

    kept_tokens = (NAMESPACE,)
    openings = (f"{NAMESPACE}<tool_call>",)
    function, function_end = f'{NAMESPACE}<invoke name="', f"{NAMESPACE}</invoke>"
    parameter, parameter_end = f"{NAMESPACE}<", f"{NAMESPACE}</"
    closings = (f"{NAMESPACE}</tool_call>",)

    def _read_parameters(self, parameters: Mapping[str, Any] | None) -> Steps[bool]:
        separator = ""
        while True:
            yield from self.reader.take_spaces()
            if (yield from self.reader.take_if(self.function_end)):
                return True
            if not (yield from self.reader.take_if(NAMESPACE)):
                return not self.reader.is_ended
            name = yield from self._read_opening_tag()
            if not name:
                return not self.reader.is_ended
            self.add_arguments(f"{separator}{json_text(name)}: ")
            separator = ", "
            if not (yield from self._pass_element(name, property_schema(parameters, name), MAX_DEPTH)):
                return False

    def _read_opening_tag(self) -> Steps[str]:
        """The name of the next element; empty if there is none."""
        if not (yield from self.reader.take_if("<")):
            return ""
        name = yield from self.reader.take_while(_ELEMENT_CHARACTERS, MAX_NAME_CHARS)
        return name.strip() if (yield from self.reader.take_if(">")) else ""

    def _pass_element(self, name: str, schema: Mapping[str, Any], max_depth: int) -> Steps[bool]:
        """Writes the value of an element whose opening tag was taken; False if it is malformed or incomplete."""
        if types_of(schema) == {"string"}:
            return (yield from self._pass_text(f"{NAMESPACE}</{name}>"))
        text = yield from self._read_text()
        if text is None:
            return False
        if (yield from self.reader.take_if(f"</{name}>")):
            self.add_arguments(converted(text, schema) if types_of(schema) else json_text(text))
            return True
        child = yield from self._read_opening_tag()
        if not child or not max_depth:
            return False
        is_list = "array" in types_of(schema) or (not types_of(schema) and child == "item")
        self.add_arguments("[" if is_list else "{")
        separator = ""
        while child:
            self.add_arguments(separator if is_list else f"{separator}{json_text(child)}: ")
            separator = ", "
            inner = schema.get("items") if is_list else property_schema(schema, child)
            if not (yield from self._pass_element(child, inner if isinstance(inner, Mapping) else {}, max_depth - 1)):
                return False
            yield from self.reader.take_spaces()
            if not (yield from self.reader.take_if(NAMESPACE)):
                return False
            if (yield from self.reader.take_if(f"</{name}>")):
                self.add_arguments("]" if is_list else "}")
                return True
            child = yield from self._read_opening_tag()
        return False

    def _pass_text(self, end: str) -> Steps[bool]:
        self.add_arguments('"')
        while True:
            text, marker = self.reader.take_until((end,))
            self.add_arguments(json_text(text)[1:-1])
            if marker:
                self.add_arguments('"')
            if marker or self.reader.is_ended:
                return bool(marker)
            yield

    def _read_text(self) -> Steps[str | None]:
        """Text up to the next marker, which is taken; None if there is none, or the text is too long to be held."""
        pieces: list[str] = []
        num_chars = 0
        while True:
            text, marker = self.reader.take_until((NAMESPACE,))
            pieces.append(text)
            num_chars += len(text)
            if marker:
                return "".join(pieces) if num_chars <= MAX_HELD_CHARS else None
            if self.reader.is_ended or num_chars > MAX_HELD_CHARS:
                return None
            yield
