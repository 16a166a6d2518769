"""Passes on a JSON object while it arrives, so that it can be closed at any place."""

from __future__ import annotations

import json

MAX_DEPTH = 128
MAX_PENDING_CHARS = 4096
"""Maximum length of a number, and of a key with the white space before it; more white space is left out."""

_CLOSER = {"{": "}", "[": "]"}
_SPACES = frozenset(" \t\r\n")
_SCALAR = frozenset("0123456789+-.eEtruefalsnuTFNo")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPABLE = frozenset('"\\/bfnrt')
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}
# What has to come next: a value, a value or the end of a list, a key or the end of an object, and so on.
_VALUE, _ITEM, _KEY, _COLON, _COMMA = range(5)


class JsonWriter:
    """Follows one object, and writes what of it can be completed.

    A key is written together with the start of its value, and a number or a word when it is complete. So `close` only
    has to add quotes and brackets. Slips of models are mended: line ends in strings, backslashes before other
    characters, commas before a bracket, and the words of Python.

    Attributes:
        is_complete: The object has ended.
        is_broken: It is not JSON from here on.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._written: list[str] = []
        self._pending = ""  # white space, a comma and a key, which are written with the value
        self._closers: list[str] = []
        self._next = _VALUE
        self._is_in_string = False
        self._is_key = False
        self._escape = ""  # the part of an escape sequence that has arrived
        self._scalar = ""
        self._backslash = -1  # place of the next one in the text

    @property
    def num_pending_chars(self) -> int:
        """Number of characters that are not written yet."""
        return len(self._pending) + len(self._scalar)

    def take(self) -> str:
        """The text that was written since the last call."""
        text = "".join(self._written)
        self._written.clear()
        return text

    def scan(self, text: str, start: int, stop: int) -> int:
        """Continues at `start`; returns the end of the object, the place of an error, or `stop`."""
        position, self._backslash = start, -1
        while position < stop and not self.is_complete and not self.is_broken:
            follow = self._follow_string if self._is_in_string else self._follow_structure
            position = follow(text, position, stop)
        return position

    def close(self) -> None:
        """Writes what is missing at the end: an incomplete member is left out, an incomplete string ends."""
        if self.is_complete:
            return
        if self._is_in_string and not self._is_key:
            self._written.append('"')
        elif self._scalar:
            self._end_scalar()
        self._written += reversed(self._closers) if self._closers else ["{}"]
        self.is_complete = True

    def _follow_structure(self, text: str, position: int, stop: int) -> int:
        character = text[position]
        if self._scalar or (self._next in (_VALUE, _ITEM) and self._closers and character in _SCALAR):
            return self._follow_scalar(text, position, stop)
        if character in _SPACES:
            self._hold(character)
        elif not self._apply(character):
            self.is_broken = True
            return position
        return position + 1

    def _hold(self, character: str) -> None:
        if len(self._pending) < MAX_PENDING_CHARS or character not in _SPACES:
            self._pending += character

    def _apply(self, character: str) -> bool:
        """Applies a character between values; False if it cannot stand here."""
        expected = self._next
        if not self._closers:
            return character == "{" and self._open(character)
        if character == '"' and expected in (_VALUE, _ITEM, _KEY):
            self._begin_string(is_key=expected == _KEY)
        elif character in _CLOSER and expected in (_VALUE, _ITEM):
            return self._open(character)
        elif character == self._closers[-1] and expected in (_ITEM, _KEY, _COMMA):
            self._pending = self._pending.replace(",", "")
            self._write(self._closers.pop())
            self.is_complete = not self._closers
        elif character == ":" and expected == _COLON:
            self._hold(character)
            self._next = _VALUE
        elif character == "," and expected == _COMMA:
            self._hold(character)
            self._next = _KEY if self._closers[-1] == "}" else _ITEM
        else:
            return False
        return True

    def _open(self, character: str) -> bool:
        if len(self._closers) >= MAX_DEPTH:
            return False
        self._write(character)
        self._closers.append(_CLOSER[character])
        self._next = _KEY if character == "{" else _ITEM
        return True

    def _write(self, value: str) -> None:
        """Writes a value, or the start of one, and what was pending before it."""
        self._written += (self._pending, value)
        self._pending = ""
        self._next = _COMMA

    def _begin_string(self, *, is_key: bool) -> None:
        self._is_in_string, self._is_key = True, is_key
        if is_key:
            self._pending += '"'
        else:
            self._write('"')

    def _follow_string(self, text: str, position: int, stop: int) -> int:
        if self._escape:
            return self._follow_escape(text, position)
        if self._backslash < position:
            found = text.find("\\", position, stop)
            self._backslash = found if found >= 0 else stop
        quote = text.find('"', position, self._backslash)
        end = quote if quote >= 0 else self._backslash
        self._add(text[position:end])
        if quote >= 0:
            self._add('"')
            self._is_in_string = False
            self._next = _COLON if self._is_key else _COMMA
        elif end < stop:
            self._escape = "\\"
        else:
            return stop
        return end + 1

    def _follow_escape(self, text: str, position: int) -> int:
        """Applies the next character after a backslash; it is not taken if it does not belong to the sequence."""
        character, before = text[position], self._escape
        if before == "\\" and (character in _ESCAPABLE or character == "'"):
            self._add(character if character == "'" else before + character)
            self._escape = ""
        elif (before == "\\" and character == "u") or (len(before) > 1 and character in _HEX_DIGITS):
            self._escape += character
            if len(self._escape) == len("\\uFFFF"):
                self._add(self._escape)
                self._escape = ""
        else:
            self._add("\\" + before)
            self._escape = ""
            return position
        return position + 1

    def _add(self, text: str) -> None:
        """Adds to the string."""
        text = text if text.isprintable() else text.translate(_CONTROLS)
        if not self._is_key:
            self._written.append(text)
            return
        self._pending += text
        self.is_broken = len(self._pending) > 2 * MAX_PENDING_CHARS

    def _follow_scalar(self, text: str, start: int, stop: int) -> int:
        position = start
        while position < stop and text[position] in _SCALAR:
            position += 1
        self._scalar += text[start:position]
        if len(self._scalar) > MAX_PENDING_CHARS:
            self.is_broken, self._scalar = True, ""
        elif position < stop:
            self.is_broken = not self._end_scalar()
        return position

    def _end_scalar(self) -> bool:
        """Writes the number or word; False if it is neither, and is left out."""
        text, self._scalar = self._scalar, ""
        found = _WORDS.get(text) or _number(text)
        if found:
            self._write(found)
        return bool(found)


def _number(text: str) -> str:
    """The same number; empty if the text is none, or one with too many digits for a reader in Python."""
    try:
        return text if isinstance(json.loads(text), int | float) else ""
    except ValueError:
        return ""
