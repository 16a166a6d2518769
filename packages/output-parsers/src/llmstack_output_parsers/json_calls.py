"""Base of parsers for calls that are JSON objects.

A call is `{"name": ..., "arguments": {...}}`, and its arguments are passed on while they arrive.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmstack_output_parsers.json_scanner import JsonScanner
from llmstack_output_parsers.parser import ToolParser
from llmstack_output_parsers.reader import SPACES, Steps

MAX_NAME_CHARS = 256
_OTHER_KEYS = ("id", "type")
_SPACES = frozenset(SPACES)


@dataclass(slots=True)
class _Call:
    """State of a call while its object is parsed; `arguments` is kept until a name after it."""

    is_certain: bool
    name: str = ""
    arguments: str = ""
    has_begun: bool = False


class JsonCallParser(ToolParser):
    """Base of the parsers of JSON calls.

    A call begins when its name is known and its arguments are known to be an object. Until then its text is held, and
    becomes content if it is not a call. All text after that is passed on as the model writes it, except for slips.

    Attributes:
        name_key: Key of the name in the object.
        argument_keys: Keys of the arguments in the object.
    """

    name_key: ClassVar[str] = "name"
    argument_keys: ClassVar[Sequence[str]] = ("arguments", "parameters")

    def read_call(self, before: str = "", *, is_certain: bool) -> Steps[bool]:
        """Parses the next object. False if it is not a call; then it is content, after `before`.

        `is_certain`: A marker precedes the call. Without one, only the name of a known function makes an object a call.
        """
        self.reader.hold()
        yield from self.reader.take_spaces()
        has_begun = yield from self._read_object(is_certain)
        held = self.reader.release()
        if not has_begun:
            self.say_refused(before + held)
        return has_begun

    def read_array(self, before: str = "", *, is_certain: bool = True) -> Steps[None]:
        """Parses the next array of calls; all other text is content. `is_certain` as in `read_call`."""
        before += self.reader.take(1)
        num_read = 0
        while (yield from self.read_call(before, is_certain=is_certain)):
            num_read += 1
            if (yield from self.reader.take_spaces()) != ",":
                break
            before = self.reader.take(1)
        if num_read:
            yield from self.reader.take_if("]")

    def _read_object(self, is_certain: bool) -> Steps[bool]:
        """True if a call has begun, whether or not its object is well formed to the end."""
        if not (yield from self.reader.take_if("{")):
            return False
        call = _Call(is_certain)
        while key := (yield from self._read_key()):
            if not (yield from self._read_member(call, key)):
                return call.has_begun
        if key is None or not call.name:
            return call.has_begun
        if not call.has_begun:
            self._begin(call.name)
            self.add_arguments(call.arguments or "{}")
        return True

    def _read_member(self, call: _Call, key: str) -> Steps[bool]:
        """Parses the value of `key`; False if there can be no call, or no more of it."""
        if key == self.name_key and not call.name:
            call.name = yield from self._read_name(call.is_certain)
            return bool(call.name)
        if key in self.argument_keys and not call.has_begun and not call.arguments:
            if call.name:
                call.has_begun = yield from self.pass_arguments(call.name)
                return call.has_begun
            call.arguments = yield from self._read_arguments()
            return bool(call.arguments)
        is_harmless = call.has_begun or call.is_certain or key in _OTHER_KEYS
        return is_harmless and (yield from self._skip_value())

    def _read_key(self) -> Steps[str | None]:
        """The next key, its colon taken; empty at the end of the object, None if it is malformed."""
        character = yield from self.reader.take_spaces()
        if character == ",":
            self.reader.take(1)
            character = yield from self.reader.take_spaces()
        if character == "}":
            self.reader.take(1)
            return ""
        key = yield from self._read_string(MAX_NAME_CHARS)
        colon = yield from self.reader.take_spaces()
        if not key or colon != ":":
            return None
        self.reader.take(1)
        yield from self.reader.take_spaces()
        return key

    def _read_name(self, is_certain: bool) -> Steps[str]:
        """The name of a function; empty if there is none."""
        name = (yield from self._read_string(MAX_NAME_CHARS)) or ""
        return name if is_certain or name in self.tools else ""

    def _read_string(self, max_chars: int) -> Steps[str | None]:
        """A string's value; None if there is no string, or a longer one."""
        if (yield from self.reader.peek()) != '"':
            return None
        text = yield from self.reader.take_json(JsonScanner(), max_chars)
        return None if text is None else _decoded(text)

    def pass_arguments(self, name: str) -> Steps[bool]:
        """Begins the call and passes on its arguments; False if they are not an object."""
        if (yield from self.reader.peek()) != "{":
            arguments = yield from self._read_arguments()
            if arguments:
                self._begin(name)
                self.add_arguments(arguments)
            return bool(arguments)
        head = self.reader.take(1)
        head += yield from self.reader.take_while(_SPACES, self.reader.room)
        if (yield from self.reader.peek()) not in ('"', "}"):
            return False
        self._begin(name)
        self.add_arguments(head)
        yield from self.pass_object()
        return True

    def pass_object(self) -> Steps[None]:
        """Passes on the arguments of the call that has begun, or their rest."""
        writer = self.writer
        while True:
            self.reader.take_json_piece(writer)
            if writer.is_complete or writer.is_broken or self.reader.is_ended:
                return
            yield

    def _read_arguments(self) -> Steps[str]:
        """The arguments in one piece: an object, one in a string, or null; empty if they are another value."""
        text = yield from self.reader.take_json(JsonScanner(), self.reader.room)
        if text is None:
            return ""
        if text == "null":
            return "{}"
        if text.startswith('"'):
            text = (_decoded(text) or "").strip()
        return text if text.startswith("{") else ""

    def _skip_value(self) -> Steps[bool]:
        return (yield from self.reader.take_json(JsonScanner(), self.reader.room)) is not None

    def _begin(self, name: str) -> None:
        self.reader.release()  # it is a call, so its text cannot become content
        self.begin_call(name)


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
