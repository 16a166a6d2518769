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


def without_escapes(body: bytes | bytearray) -> bytes | bytearray:
    r"""The document, of equal length, with `__` for each `\\` and `\"`: the quotes that are left delimit strings."""
    return body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body


def check_structure(unescaped: bytes | bytearray, limits: JSONLimits) -> bool:
    """Whether the document has a number of more than 640 digits.

    Brackets, commas and digits within strings do not count. Takes time linear in the length.

    Args:
        unescaped: The result of `without_escapes`.
        limits: The limits to check.

    Raises:
        HTTPError: 400; over a limit, or nested deeper than 64.
    """
    if unescaped.count(b'"') > 2 * limits.max_strings:
        raise HTTPError(json_too_complex("strings", limits.max_strings))
    outside = b"".join(unescaped.split(b'"')[::2])
    brackets = outside.translate(_STEPS, _NOT_BRACKETS)
    # A document with more brackets than these is over the limit of nodes, or unbalanced.
    if _depth(brackets[: 2 * limits.max_nodes]) > MAX_DEPTH:
        raise HTTPError(invalid_json(f"it is nested deeper than {MAX_DEPTH} levels"))
    if brackets.count(1) + outside.count(b":") > limits.max_nodes:
        raise HTTPError(json_too_complex("arrays, objects and members", limits.max_nodes))
    has_long_number = _LONG_NUMBER in outside.translate(_ALL_DIGITS_TO_ZERO)
    max_values = limits.max_values_beside_long_integers if has_long_number else limits.max_values
    if sum(outside.count(sign) for sign in (b",", b".", b"e", b"E")) >= max_values:
        raise HTTPError(json_too_complex("values", max_values))
    return has_long_number


def _depth(brackets: bytes) -> int:
    """The deepest level, where each byte is a step of 1 or -1."""
    return max(accumulate(memoryview(brackets).cast("b")), default=0)
