"""Limits on the structure of a JSON document, checked before it is decoded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import accumulate

from llmstack_server.web.errors import HTTPError, invalid_json, json_too_complex

MAX_DEPTH = 64

_NOT_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")
# As signed bytes, an opening bracket is 1 and a closing one is -1.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_ALL_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"0" * 9)
# CPython's lowest limit on the digits of an integer is 640. Up to it, conversion never fails and is fast.
_LONG_NUMBER = b"0" * 641
_MAX_BACKSLASHES = 64


@dataclass(frozen=True, slots=True)
class JSONLimits:
    """Limits on the number of things in a document. The time to decode it is proportional to these numbers.

    A decoder written in C keeps the interpreter lock, so a thread would delay other requests as the event loop does.
    The defaults permit about 50 ms. They are far above what fits into a context: a chat has three nodes per message,
    and token ids are values.

    Attributes:
        max_nodes: Arrays, objects and members of objects together.
        max_strings: Keys and strings together.
        max_values: Entries of arrays and members of objects together; a decimal point or an exponent counts as another.
    """

    max_nodes: int = 1 << 16
    max_strings: int = 1 << 17
    max_values: int = 1 << 20

    @classmethod
    @functools.cache
    def of_body(cls, max_bytes: int) -> JSONLimits:
        """The defaults, which suit 4 MiB, or more where the largest body in bytes is larger."""
        scale = max(1, -(-max_bytes // (4 << 20)))
        return cls(cls().max_nodes * scale, cls().max_strings * scale, cls().max_values * scale)

    @property
    def max_values_beside_long_integers(self) -> int:
        """`max_values` where a slower decoder is needed; no field takes such an integer."""
        return self.max_values >> 4


def is_surely_simple(document: bytes | bytearray, limits: JSONLimits) -> bool:
    """Whether a short document is within the limits by its length and its brackets, wherever they stand.

    It has no more brackets than levels are permitted, no number of more than 640 digits and no `\\u`. Most bodies are
    so, and need no further look.
    """
    return (
        len(document) < min(limits.max_nodes, limits.max_strings, limits.max_values)
        and document.count(b"[") + document.count(b"{") <= MAX_DEPTH
        and b"\\u" not in document
        and _LONG_NUMBER not in document.translate(_ALL_DIGITS_TO_ZERO)
    )


def without_escapes(body: bytes | bytearray) -> bytes | bytearray:
    r"""The document, of equal length, with `__` for each `\\` and `\"`: the quotes that are left delimit strings."""
    return body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body


def escape_ends(document: bytes | bytearray, end: int) -> int:
    """The first place from `end` on where the document can be cut: not between a backslash and what it escapes."""
    piece = document[max(0, end - _MAX_BACKSLASHES) : end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    if num_backslashes == len(piece) and num_backslashes < end:  # as good as never: only backslashes
        num_backslashes = end - len(document[:end].rstrip(b"\\"))
    return min(end + num_backslashes % 2, len(document))


def check_structure(unescaped: bytes | bytearray, limits: JSONLimits) -> bool:
    """Whether the document has a number of more than 640 digits.

    Brackets, commas and digits within strings do not count. Takes time linear in the length.

    Args:
        unescaped: The result of `without_escapes`.
        limits: The limits to check.

    Raises:
        HTTPError: 400; over a limit, or nested deeper than 64.
    """
    check = StructureCheck(limits)
    check.add(unescaped)
    return check.finish()


class StructureCheck:
    """The structure of a document, of which one piece is counted after the other."""

    def __init__(self, limits: JSONLimits) -> None:
        self._limits = limits
        self._num_quotes = self._num_brackets = self._num_nodes = self._num_values = 0
        self._level = self._depth = 0
        self._last_digits = b""
        self._has_long_number = False

    def add(self, unescaped: bytes | bytearray) -> None:
        """Counts the next piece of what `without_escapes` returns.

        Raises:
            HTTPError: 400; there are too many strings.
        """
        parts = unescaped.split(b'"', 2 * self._limits.max_strings - self._num_quotes + 1)
        is_inside = self._num_quotes % 2
        self._num_quotes += len(parts) - 1
        if self._num_quotes > 2 * self._limits.max_strings:
            raise HTTPError(json_too_complex("strings", self._limits.max_strings))
        outside = b"".join(parts[is_inside::2])
        if not outside:
            return
        self._add_brackets(outside.translate(_STEPS, _NOT_BRACKETS))
        self._num_nodes += outside.count(b":")
        self._num_values += sum(outside.count(sign) for sign in (b",", b".", b"e", b"E"))
        digits = self._last_digits + outside.translate(_ALL_DIGITS_TO_ZERO)
        self._has_long_number = self._has_long_number or _LONG_NUMBER in digits
        self._last_digits = digits[1 - len(_LONG_NUMBER) :]

    def finish(self) -> bool:
        """Whether the document has a number of more than 640 digits; raises as `check_structure`."""
        limits = self._limits
        if self._depth > MAX_DEPTH:
            raise HTTPError(invalid_json(f"it is nested deeper than {MAX_DEPTH} levels"))
        if self._num_nodes > limits.max_nodes:
            raise HTTPError(json_too_complex("arrays, objects and members", limits.max_nodes))
        max_values = limits.max_values_beside_long_integers if self._has_long_number else limits.max_values
        if self._num_values >= max_values:
            raise HTTPError(json_too_complex("values", max_values))
        return self._has_long_number

    def _add_brackets(self, steps: bytes) -> None:
        """Follows the levels; each byte is a step of 1 or -1."""
        self._num_nodes += steps.count(1)
        # A document with more brackets than these is over the limit of nodes, or unbalanced.
        followed = steps[: max(0, 2 * self._limits.max_nodes - self._num_brackets)]
        self._num_brackets += len(steps)
        self._depth = max(self._depth, max(accumulate(memoryview(followed).cast("b"), initial=self._level)))
        self._level += 2 * followed.count(1) - len(followed)
