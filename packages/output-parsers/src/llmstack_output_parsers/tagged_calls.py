"""Tool calls as tags around parameters, whose values are bare text."""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS
from llmstack_output_parsers.parser import ToolParser
from llmstack_output_parsers.reader import MAX_HELD_CHARS, SPACES, Steps, without_cut_tag
from llmstack_output_parsers.schema_values import Schemas, json_text

NAME_CHARACTERS = frozenset(string.printable) - frozenset("<>\r\n\x0b\x0c")
_QUOTED_CHARACTERS = NAME_CHARACTERS - frozenset('"')
BLANKS = frozenset(SPACES)
MAX_GAP_CHARS = 256
"""Maximum white space between two tags, where it must be known whether the first one closes a value."""


class TaggedToolParser(ToolParser):
    """Base of the parsers of calls between tags.

    The arguments become a JSON object. Strings are passed on while they arrive. Other values, by the function's schema,
    are converted when they are complete. Models omit tags: the next valid one is accepted. A tag inside a value
    closes it only if the format can go on after the tag; otherwise it is part of the value.

    Attributes:
        openings: Texts that may begin a call in content; the first characters of all tags are the same.
        preambles: Texts that may stand between an opening and the function, in this order.
        function, function_end: Before the function's name, and after its parameters.
        name_ends: Texts that may follow a name.
        parameter, parameter_end: Before a parameter's name, and after its value.
        other_parameter_ends: Further spellings of `parameter_end`.
        key_ends: Texts that may follow a parameter's name, with the type that they give the value: a schema in place of
            the function's, or None.
        closings: Texts that may stand after a call, in this order.
        trims_lines: Whether a line end next to a value belongs to the tag.
        passes_strings: Whether strings are passed on while they arrive.
    """

    openings: ClassVar[Sequence[str]] = ()
    preambles: ClassVar[Sequence[str]] = ()
    function: ClassVar[str]
    function_end: ClassVar[str]
    name_characters: ClassVar[frozenset[str]] = _QUOTED_CHARACTERS
    name_ends: ClassVar[Sequence[str]] = ('">',)
    parameter: ClassVar[str]
    parameter_end: ClassVar[str]
    other_parameter_ends: ClassVar[Sequence[str]] = ()
    key_ends: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {'">': None}
    closings: ClassVar[Sequence[str]] = ()
    trims_lines: ClassVar[bool] = True
    passes_strings: ClassVar[bool] = True

    @property
    def starts(self) -> Sequence[str]:
        """All openings, and the function's tag, since models omit openings."""
        return tuple(dict.fromkeys((*self.openings, self.function)))

    @property
    def no_content(self) -> tuple[str, ...]:
        """The tags around calls as well, where they are no single tokens."""
        return tuple(dict.fromkeys((*self.kept_tokens, *self.openings, *self.closings)))

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until(self.starts)):
            if before != self.function:
                before = yield from self._read_opening(before)
            if before:
                yield from self._read_function(before)

    def _read_opening(self, before: str) -> Steps[str]:
        """The text before the function's name; empty, and content, if no function follows."""
        self.reader.hold()
        yield from self.reader.take_spaces()
        for text in self.preambles:
            yield from self.reader.take_if(text)
            yield from self.reader.take_spaces()
        has_function = yield from self.reader.take_if(self.function)
        before += self.reader.release()
        if not has_function:
            self.say_refused(before)
        return before if has_function else ""

    def _read_function(self, before: str) -> Steps[None]:
        self.reader.hold()
        name = yield from self.reader.take_while(self.name_characters, MAX_NAME_CHARS)
        is_closed = bool((yield from self._take_one(self.name_ends)))
        held = self.reader.release()
        if not is_closed or not name.strip():
            self.say_refused(before + held)
            return
        function = self.called_function(name.strip())
        self.begin_call(function)
        self.add_arguments("{")
        if (yield from self._read_parameters(Schemas(self.tools.get(function)))):
            self.add_arguments("}")
        for text in self.closings:
            yield from self.reader.take_spaces()
            yield from self.reader.take_if(text)
        if self.reader.ends_within((*self._value_ends, *self._tags, *self.key_ends, *self.no_content)):
            self.reader.take_rest()  # the end of the text has cut a tag

    def called_function(self, name: str) -> str:
        """The function that a written name means."""
        return name

    def _take_one(self, texts: Sequence[str]) -> Steps[str]:
        """Takes the first of the texts that is next, and returns it; empty if none is."""
        for text in texts:
            if (yield from self.reader.take_if(text)):
                return text
        return ""

    def _read_parameters(self, schemas: Schemas) -> Steps[bool]:
        """Up to the end of the function; False if the text, and the arguments with it, ends before."""
        marker = yield from self._skip_to_tag()
        num_read = 0
        while marker == self.parameter:
            key = yield from self.reader.take_while(self.name_characters, MAX_NAME_CHARS)
            key_end = yield from self._read_key_end()
            if not key_end:
                return not self.reader.is_ended
            self.add_arguments(f"{', ' if num_read else ''}{json_text(key.strip())}: ")
            num_read += 1
            schema = self.key_ends.get(key_end) or schemas.of_property(key.strip())
            marker = yield from self._read_value(schemas, schema)
            if marker in self._value_ends:
                marker = yield from self._skip_to_tag()
        return bool(marker)

    def _read_key_end(self) -> Steps[str]:
        """The text after a parameter's name; empty if it is something else."""
        return (yield from self._take_one(tuple(self.key_ends)))

    @functools.cached_property
    def _tags(self) -> tuple[str, ...]:
        """The tags that may stand between parameters, each once."""
        return tuple(dict.fromkeys((self.parameter, self.function_end, *self.closings)))

    def _skip_to_tag(self) -> Steps[str]:
        """The next tag between parameters; empty at the end of the text. Text between them has no meaning."""
        character = yield from self.reader.take_spaces()
        if character == self.parameter[0] and (tag := (yield from self._take_one(self._tags))):
            return tag
        return "" if self.reader.is_ended and not character else self.function_end

    def _read_value(self, schemas: Schemas, schema: Mapping[str, object]) -> Steps[str]:
        """Passes on one value and returns the tag after it; empty at the end of the text."""
        if self.trims_lines and (yield from self.reader.peek()) == "\n":
            self.reader.take(1)
        is_passed = self.passes_strings and schemas.is_string(schema)
        return (yield from self._pass_string() if is_passed else self._read_converted(schemas, schema))

    def argument_of(self, text: str, schemas: Schemas, schema: Mapping[str, object]) -> str:
        """The JSON of a value that was read as a whole."""
        return schemas.converted(text, schema)

    @functools.cached_property
    def _value_ends(self) -> tuple[str, ...]:
        return (self.parameter_end, *self.other_parameter_ends)

    @functools.cached_property
    def _ends(self) -> tuple[str, ...]:
        return (*self._value_ends, *self._tags)

    def _take_value(self) -> Steps[tuple[str, str]]:
        """More text of a value, and the tag that closes it, which is taken; empty if none does.

        Both are empty if more text has to arrive.
        """
        text, marker = self.reader.take_until(self._ends)
        if not marker and self.reader.is_ended:
            text = without_cut_tag(text, (*self._ends, *self.no_content))
        if marker and not (yield from self.reader.look_ahead(self._goes_on_after(marker))):
            return text + marker, ""
        return text, marker

    def _goes_on_after(self, marker: str) -> Steps[bool]:
        """Whether the format can go on after a tag inside a value, up to which the text was taken."""
        if marker == self.parameter:
            return (yield from self._begins_parameter())
        yield from self.reader.take_while(BLANKS, MAX_GAP_CHARS)
        followers = self._followers(marker)
        return bool((yield from self._take_one(followers))) or self.reader.ends_within(followers)

    def _begins_parameter(self) -> Steps[bool]:
        """Whether a parameter's name follows its tag."""
        name = yield from self.reader.take_while(self.name_characters, MAX_NAME_CHARS)
        key_ends = tuple(self.key_ends)
        return bool(name.strip() and (yield from self._take_one(key_ends))) or self.reader.ends_within(key_ends)

    def _followers(self, marker: str) -> tuple[str, ...]:
        """The tags that may stand after a tag that closes a value."""
        starts = (*self.openings, self.function)
        if marker in self._value_ends:
            return (*self._tags, *starts)
        if marker == self.function_end:
            return (*self.closings, *starts)
        return (*self.closings[self.closings.index(marker) + 1 :], *starts)

    def _pass_string(self, pending: str = "") -> Steps[str]:
        """`pending`: Text of the value that was read before. The last line end belongs to the tag."""
        self.add_arguments('"')
        while True:
            new_text, marker = yield from self._take_value()
            text = pending + new_text
            pending = "\n" if self.trims_lines and text.endswith("\n") else ""
            self.add_arguments(json_text(text.removesuffix(pending))[1:-1])
            if marker:
                self.add_arguments('"')
            if marker or self.reader.is_at_end:
                return marker
            if not new_text or not self.reader.has_text:
                yield

    def _read_converted(self, schemas: Schemas, schema: Mapping[str, object]) -> Steps[str]:
        """Converts a value; one that is too long to be held is a string."""
        pieces: list[str] = []
        num_chars = 0
        while True:
            text, marker = yield from self._take_value()
            pieces.append(text)
            num_chars += len(text)
            if num_chars > MAX_HELD_CHARS and not marker:
                return (yield from self._pass_string("".join(pieces)))
            if marker:
                text = "".join(pieces)
                text = text.removesuffix("\n") if self.trims_lines else text
                is_held = num_chars <= MAX_HELD_CHARS
                self.add_arguments(self.argument_of(text, schemas, schema) if is_held else json_text(text))
            if marker or self.reader.is_at_end:
                return marker
            if not text or not self.reader.has_text:
                yield
