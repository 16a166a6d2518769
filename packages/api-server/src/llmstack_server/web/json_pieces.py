"""Decoding of large JSON documents in pieces.

Other requests run between two pieces. The decoder of the standard library keeps the interpreter lock, so a thread would
not help. A document is cut at commas outside of strings. Each piece becomes a document by opening brackets before it,
for the containers that it is inside of, and closing ones after it. The decoded values are appended to these containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmstack_types.json_values import JSONObject

PIECE_BYTES = 1 << 14

_NOT_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")
_CLOSING = {"[": "]", "{": "}"}
_BLANKS = b" \t\r\n"
# Stands before the rest of a member whose key is in an earlier piece. No document has it: it is half a surrogate pair.
_KEY = "\ud800"
_KEY_TEXT = '"\\ud800":'


class MalformedPieceError(ValueError):
    """The document is not JSON."""


class DuplicateKeyError(ValueError):
    """A key occurs twice in one object."""


@dataclass(slots=True)
class PiecewiseDecoder:
    """Decodes one document, a piece for each step of `run`.

    Attributes:
        value: The document, once `run` has ended.
    """

    document: bytes | bytearray
    unescaped: bytes | bytearray
    decode: Callable[[str], Any]
    value: Any = None
    _open: list[list[Any] | JSONObject] = field(default_factory=list)

    def run(self) -> Iterator[None]:
        """Decodes; other work may be done after each step.

        Raises:
            MalformedPieceError, DuplicateKeyError: The document is invalid.
            ValueError: As `decode`, for text that is not JSON in UTF-8.
        """
        kinds, start = "", 0
        if self._cut(0) == len(self.document):
            self.value = self.decode(self.document.decode("utf-8"))
            return
        while True:
            end = self._cut(start)
            is_last = end == len(self.document)
            text = bytes(self.document[start:end])
            _check_ends(text, is_first=start == 0, is_last=is_last)
            depth, kinds_after = _follow(kinds, self.unescaped[start:end])
            if bool(kinds_after) == is_last:
                raise MalformedPieceError
            closing = "".join(_CLOSING[kind] for kind in reversed(kinds_after))
            self._append(self.decode(_prefix(kinds) + text.decode("utf-8") + closing), len(kinds))
            self._open_last(depth, len(kinds_after))
            if is_last:
                return
            kinds, start = kinds_after, end + 1
            yield

    def _cut(self, start: int) -> int:
        """The first comma outside of strings at least `PIECE_BYTES` after `start`; the end where there is none.

        `start` itself is outside of strings.
        """
        text = self.unescaped
        at = min(start + PIECE_BYTES, len(text))
        if text.count(b'"', start, at) % 2:
            at = text.find(b'"', at) + 1
        while 0 < at < len(text):
            comma = text.find(b",", at)
            if comma < 0:
                break
            quote = text.find(b'"', at, comma)
            if quote < 0:
                return comma
            at = text.find(b'"', quote + 1) + 1
        return len(text)

    def _append(self, value: Any, num_open: int) -> None:
        """Appends what a piece holds to the containers that were open before it."""
        if not num_open:
            self.value = value
            return
        for level in range(num_open):
            container = self._open[level]
            inner = None
            if isinstance(container, dict):
                inner = value.pop(_KEY, None)
                if not container.keys().isdisjoint(value):
                    raise DuplicateKeyError
                container.update(value)
            else:
                if level < num_open - 1:
                    inner = value[0]
                    del value[0]
                container += value
            value = inner

    def _open_last(self, depth: int, num_open: int) -> None:
        """Finds the containers that are open after a piece: those above `depth` are new, each the last of its own."""
        del self._open[depth:]
        while len(self._open) < num_open:
            if not self._open:
                self._open.append(self.value)
                continue
            last = self._open[-1]
            self._open.append(last[next(reversed(last))] if isinstance(last, dict) else last[-1])


def _prefix(kinds: str) -> str:
    """The text that opens the containers again; the innermost one goes on with a new entry or member."""
    return "".join("[" if kind == "[" else "{" + _KEY_TEXT for kind in kinds[:-1]) + kinds[-1:]


def _check_ends(text: bytes, *, is_first: bool, is_last: bool) -> None:
    """Refuses a comma beside a bracket, which the brackets of the pieces would hide."""
    if not is_first and text.lstrip(_BLANKS)[:1] in (b"]", b"}", b""):
        raise MalformedPieceError
    if not is_last and text.rstrip(_BLANKS)[-1:] in (b"[", b"{", b""):
        raise MalformedPieceError


def _follow(kinds: str, unescaped: bytes | bytearray) -> tuple[int, str]:
    """The lowest depth within a piece, and the containers that are open after it, as opening brackets."""
    outside = b"".join(unescaped.split(b'"')[::2])
    stack, lowest = list(kinds), len(kinds)
    for bracket in outside.translate(None, _NOT_BRACKETS).decode():
        if bracket in _CLOSING:
            stack.append(bracket)
        elif not stack or _CLOSING[stack.pop()] != bracket:
            raise MalformedPieceError
        else:
            lowest = min(lowest, len(stack))
    return lowest, "".join(stack)
