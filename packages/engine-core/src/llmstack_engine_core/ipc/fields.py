"""Checks of single message fields.

Each raises `CodecError` and names the field.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_types import LLMStackError

MAX_INT = 2**63 - 1
MAX_TEXT_LENGTH = 65_536

Check = Callable[[Any, str], Any]


class CodecError(LLMStackError, ValueError):
    """Bytes that are no message of this protocol, or a message that has no bytes.

    Attributes:
        request_id: The request that the message was about, where that much could be read.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


def unpack_values(frame: bytes, max_bytes: int) -> object:
    """The values of a small message without maps, whose types the caller checks.

    Raises:
        CodecError: The bytes are too many, or no msgpack.
    """
    if len(frame) > max_bytes:
        raise CodecError(f"a message of {len(frame)} bytes is too large; {max_bytes} is the limit")
    try:
        values: object = msgpack.unpackb(frame, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CodecError(f"no message: {type(error).__name__}") from error
    return values


def text(max_length: int = MAX_TEXT_LENGTH, min_length: int = 0) -> Check:
    """A string of that many characters."""

    def check(value: Any, name: str) -> str:
        if type(value) is not str or not min_length <= len(value) <= max_length:
            raise CodecError(f"{name} must be a string of {min_length} to {max_length} characters")
        return value

    return check


def integer(low: int = 0, high: int = MAX_INT) -> Check:
    """A whole number in [low, high]; a bool is none."""

    def check(value: Any, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise CodecError(f"{name} must be an integer in [{low}, {high}]")
        return value

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A finite number in [low, high]."""

    def check(value: Any, name: str) -> float:
        if type(value) not in (float, int) or not low <= value <= high or not -math.inf < value < math.inf:
            raise CodecError(f"{name} must be a finite number in [{low}, {high}]")
        return float(value)

    return check


def check_counters(values: list[Any], name: str) -> None:
    """Refuses values that are not whole numbers from 0 on; in a few passes in C, for messages of every step."""
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_INT):
        raise CodecError(f"{name} must hold integers in [0, {MAX_INT}]")


def checked_numbers(values: list[Any], name: str) -> list[float]:
    """Finite numbers as floats."""
    if not {float, int}.issuperset(map(type, values)) or not all(map(math.isfinite, values)):
        raise CodecError(f"{name} must hold finite numbers")
    return list(map(float, values))


def boolean(value: Any, name: str) -> bool:
    """Refuses what is not a boolean."""
    if type(value) is not bool:
        raise CodecError(f"{name} must be a boolean")
    return value


def optional(check: Check) -> Check:
    """None, or what `check` accepts."""

    def check_optional(value: Any, name: str) -> Any:
        return None if value is None else check(value, name)

    return check_optional


def texts(max_length: int = MAX_TEXT_LENGTH, max_items: int = 65_536, min_length: int = 0) -> Check:
    """A list of strings."""

    def check(value: Any, name: str) -> list[str]:
        if type(value) is not list or len(value) > max_items:
            raise CodecError(f"{name} must be a list of at most {max_items} strings")
        # Three passes in C: this runs over every request of every step.
        if value:
            lengths = list(map(len, value)) if set(map(type, value)) == {str} else [-1]
            if min(lengths) < min_length or max(lengths) > max_length:
                raise CodecError(f"{name} must hold strings of {min_length} to {max_length} characters")
        return value

    return check


def row(value: Any, name: str, length: int) -> list[Any]:
    """A list of exactly that length."""
    if type(value) is not list or len(value) != length:
        raise CodecError(f"{name} must be a list of {length} items")
    return value


def pack_uint32(values: Iterable[int], name: str) -> bytes:
    """Numbers in [0, 2**32) in the machine's byte order: both ends are on one machine."""
    try:
        return array("I", values).tobytes()
    except (OverflowError, TypeError) as error:
        raise CodecError(f"{name} must hold integers in [0, 2**32)") from error


def unpack_uint32(value: Any, name: str, length: int | None = None) -> list[int]:
    """The inverse of `pack_uint32`; types and ranges hold by construction."""
    return _checked(value, name, length, item_size=4).cast("I").tolist()


def pack_floats(values: Iterable[float], name: str) -> bytes:
    """Double precision, in the machine's byte order."""
    try:
        return array("d", values).tobytes()
    except TypeError as error:
        raise CodecError(f"{name} must hold numbers") from error


def unpack_floats(value: Any, name: str, length: int | None = None) -> list[float]:
    """The inverse of `pack_floats`; refuses NaN, which compares false with every limit."""
    values = list(_checked(value, name, length, item_size=8).cast("d"))
    if any(map(math.isnan, values)):
        raise CodecError(f"{name} must not hold NaN")
    return values


def _checked(value: Any, name: str, length: int | None, item_size: int) -> memoryview:
    if type(value) is not bytes or len(value) % item_size:
        raise CodecError(f"{name} must be packed numbers of {item_size} bytes")
    if length is not None and len(value) != length * item_size:
        raise CodecError(f"{name} must hold {length} numbers")
    return memoryview(value)
