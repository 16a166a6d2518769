"""Scanner that finds the end of a JSON value in a stream of text."""

from __future__ import annotations

MAX_DEPTH = 128
_CLOSER = {"{": "}", "[": "]"}
_SCALAR = frozenset("0123456789+-.eEtruefalsnu")
_BETWEEN = _SCALAR | frozenset(" \t\r\n,:")


class JsonScanner:
    """Follows one value by its structure: nesting, strings, and which characters may stand between them.

    Malformed numbers and misplaced commas are left to the reader of the value.

    Attributes:
        is_complete: The value has ended.
        is_broken: It is not JSON.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._closers: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self._is_in_scalar = False

    def scan(self, text: str, start: int, stop: int) -> int:
        """Continues at `start`; returns the end of the value, the place of an error, or `stop`."""
        position = start
        while position < stop and not self.is_complete and not self.is_broken:
            follow = self._follow_string if self._is_in_string else self._follow_structure
            position = follow(text, position, stop)
        return position

    def end(self) -> bool:
        """Ends the text; returns whether the value is complete, as a number is then."""
        self.is_complete = self.is_complete or (self._is_in_scalar and not self.is_broken)
        return self.is_complete

    def _follow_string(self, text: str, start: int, stop: int) -> int:
        is_escaped = self._is_escaped
        for position in range(start, stop):
            if is_escaped:
                is_escaped = False
                continue
            character = text[position]
            if character == "\\":
                is_escaped = True
            elif character == '"':
                self._is_in_string = self._is_escaped = False
                self.is_complete = not self._closers
                return position + 1
        self._is_escaped = is_escaped
        return stop

    def _follow_structure(self, text: str, start: int, stop: int) -> int:
        if not self._closers:
            return self._follow_start(text, start, stop)
        for position in range(start, stop):
            character = text[position]
            if character in _BETWEEN:
                continue
            if character == '"':
                self._is_in_string = True
                return position + 1
            if not self._nest(character):
                return position
            if not self._closers:
                return position + 1
        return stop

    def _nest(self, character: str) -> bool:
        """Applies a bracket; False if the value is malformed."""
        if character in _CLOSER and len(self._closers) < MAX_DEPTH:
            self._closers.append(_CLOSER[character])
        elif self._closers[-1] == character:
            self._closers.pop()
            self.is_complete = not self._closers
        else:
            self.is_broken = True
        return not self.is_broken

    def _follow_start(self, text: str, start: int, stop: int) -> int:
        character = text[start]
        if self._is_in_scalar or character in _SCALAR:
            return self._follow_scalar(text, start, stop)
        if character == '"':
            self._is_in_string = True
        elif character in _CLOSER:
            self._closers.append(_CLOSER[character])
        else:
            self.is_broken = True
            return start
        return start + 1

    def _follow_scalar(self, text: str, start: int, stop: int) -> int:
        self._is_in_scalar = True
        for position in range(start, stop):
            if text[position] not in _SCALAR:
                self.is_complete = True
                return position
        return stop
