"""Tool calls of MiniMax M3: elements named after arguments, which may nest."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS
from llmstack_output_parsers.reader import MAX_HELD_CHARS, SPACES, Steps, without_cut_tag
from llmstack_output_parsers.schema_values import Schemas, json_text
from llmstack_output_parsers.tagged_calls import MAX_GAP_CHARS, TaggedToolParser

NAMESPACE = "]<]minimax[>["
MAX_DEPTH = 32
_SPACES = frozenset(SPACES)
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

    @property
    def no_content(self) -> tuple[str, ...]:
        """The tags around calls, and the marker alone."""
        return (*self.openings, *self.closings, NAMESPACE)

    def say_until(self, markers: Sequence[str]) -> Steps[str]:
        """The marker is no content, whether or not one of these tags follows."""
        tags = [marker.removeprefix(NAMESPACE) for marker in (*markers, *self.closings)]
        while found := (yield from super().say_until((NAMESPACE,))):
            found += yield from self._take_one(tags)
            if found in markers:
                return found
            if found == NAMESPACE and self.reader.ends_within(tags):
                self.reader.take_rest()
        return ""

    def _read_parameters(self, schemas: Schemas) -> Steps[bool]:
        separator = ""
        self._open: list[str] = []  # names of the elements around the text
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
            if not (yield from self._pass_element(schemas, name, schemas.of_property(name), MAX_DEPTH)):
                return False

    def _read_opening_tag(self) -> Steps[str]:
        """The name of the next element; empty if there is none."""
        if not (yield from self.reader.take_if("<")):
            return ""
        name = yield from self.reader.take_while(_ELEMENT_CHARACTERS, MAX_NAME_CHARS)
        return name.strip() if (yield from self.reader.take_if(">")) else ""

    def _pass_element(self, schemas: Schemas, name: str, schema: Mapping[str, object], max_depth: int) -> Steps[bool]:
        """Writes the value of an element whose opening tag was taken; False if it is malformed or incomplete."""
        self._open.append(name)
        is_whole = yield from self._pass_value(schemas, name, schema, max_depth)
        self._open.pop()
        return is_whole

    def _pass_value(self, schemas: Schemas, name: str, schema: Mapping[str, object], max_depth: int) -> Steps[bool]:
        types = schemas.types_of(schema)
        if types == {"string"}:
            return (yield from self._pass_text(name))
        text = yield from self._read_text(name)
        if text is None:
            return False
        if (yield from self._take_end(name)):
            self.add_arguments(schemas.converted(text, schema) if types else json_text(text))
            return True
        child = yield from self._read_opening_tag()
        if not child or not max_depth:
            return False
        is_list = "array" in types or (not types and child == "item")
        self.add_arguments("[" if is_list else "{")
        separator = ""
        while child:
            self.add_arguments(separator if is_list else f"{separator}{json_text(child)}: ")
            separator = ", "
            inner = schemas.items_of(schema) if is_list else schemas.property_of(schema, child)
            if not (yield from self._pass_element(schemas, child, inner, max_depth - 1)):
                return False
            yield from self.reader.take_spaces()
            if not (yield from self.reader.take_if(NAMESPACE)):
                return False
            if (yield from self.reader.take_if(f"</{name}>")):
                self.add_arguments("]" if is_list else "}")
                return True
            child = yield from self._read_opening_tag()
        return False

    def _pass_text(self, name: str) -> Steps[bool]:
        """Writes a string, up to the end of its element."""
        self.add_arguments('"')
        while True:
            text, marker = self.reader.take_until((NAMESPACE,))
            if not marker and self.reader.is_ended:
                text = without_cut_tag(text, (NAMESPACE,))
            is_end = bool(marker) and (yield from self._take_end(name))
            if marker and not is_end and self.reader.ends_within((f"</{name}>",)):
                marker = ""
                self.reader.take_rest()
            self.add_arguments(json_text(text if is_end else text + marker)[1:-1])
            if is_end:
                self.add_arguments('"')
            if is_end or self.reader.is_at_end:
                return is_end
            if not marker:
                yield

    def _read_text(self, name: str) -> Steps[str | None]:
        """Text up to the marker of the element's end or of an inner element; None if it has none, or is too long."""
        pieces: list[str] = []
        num_chars = 0
        while True:
            text, marker = self.reader.take_until((NAMESPACE,))
            pieces.append(text)
            num_chars += len(text + marker)
            if marker and num_chars <= MAX_HELD_CHARS:
                if (yield from self.reader.look_ahead(self._ends_text(name))):
                    return "".join(pieces)
                pieces.append(marker)
            if self.reader.is_at_end or num_chars > MAX_HELD_CHARS:
                return None
            if not marker:
                yield

    def _ends_text(self, name: str) -> Steps[bool]:
        """Whether the tag of an inner element follows, or the end of this one."""
        return (yield from self._take_end(name)) or bool((yield from self._read_opening_tag()))

    def _take_end(self, name: str) -> Steps[bool]:
        """Takes the closing tag, if another tag or the end of the text follows it; else it is part of the value."""
        end = f"</{name}>"
        goes_on = yield from self.reader.look_ahead(self._goes_on_after(end))
        return goes_on and (yield from self.reader.take_if(end))

    def _goes_on_after(self, marker: str) -> Steps[bool]:
        """Whether this tag is next, with a tag behind it that may follow it."""
        if not (yield from self.reader.take_if(marker)):
            return False
        yield from self.reader.take_while(_SPACES, MAX_GAP_CHARS)
        if not (yield from self.reader.take_if(NAMESPACE)):
            return self.reader.ends_within((NAMESPACE,))
        closers = (f"</{self._open[-2]}>",) if len(self._open) > 1 else ("</invoke>", "</tool_call>")
        is_tag = (yield from self._take_one(closers)) or (yield from self._read_opening_tag())
        return bool(is_tag) or self.reader.ends_within((*closers, ">"))
