"""Byte formats of records: variable-length numbers and packed arrays.

They are the same on every machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from llmstack_step_log.errors import StepLogError

MICROSECONDS = 1_000_000

_TYPECODES = frozenset("HIq")


def put_uint(buffer: bytearray, value: int) -> None:
    """Appends a number of 0 or more: seven bits per byte, the lowest first."""
    while value > 0x7F:
        buffer.append(value & 0x7F | 0x80)
        value >>= 7
    buffer.append(value)


def put_int(buffer: bytearray, value: int) -> None:
    """Appends a number of either sign; near 0 it is short."""
    put_uint(buffer, value << 1 if value >= 0 else (-value << 1) - 1)


def put_ints(buffer: bytearray, values: list[int]) -> None:
    """Appends numbers of 64 bits at most, each in 2, 4 or 8 bytes, as the largest one needs."""
    put_uint(buffer, len(values))
    if values:
        typecode, packed = pack_ints(values)
        buffer += typecode.encode()
        buffer += packed


def pack_ints(values: Iterable[int]) -> tuple[str, bytes]:
    """The narrowest typecode of `array` that holds the numbers, and their bytes, little-endian."""
    values = values if isinstance(values, list) else list(values)
    typecode, packed = _narrowest(values)
    if sys.byteorder == "big":
        packed.byteswap()
    return typecode, packed.tobytes()


def _narrowest(values: list[int]) -> tuple[str, array[int]]:
    for typecode in "HI":
        try:
            return typecode, array(typecode, values)
        except OverflowError:  # a larger one, or one below 0
            pass
    return "q", array("q", values)


def unpack_ints(typecode: str, packed: bytes) -> list[int]:
    """The inverse of `pack_ints`.

    Raises:
        StepLogError: They are no such numbers.
    """
    if typecode not in _TYPECODES:
        raise StepLogError("an array has an unknown width")
    values = array(typecode)
    if len(packed) % values.itemsize:
        raise StepLogError("an array ends inside a number")
    values.frombytes(packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


class Cursor:
    """Reads a record's payload from front to back; whatever does not fit is a `StepLogError`."""

    __slots__ = ("_data", "_end", "position")

    def __init__(self, data: bytes, position: int = 0, end: int | None = None) -> None:
        self._data = data
        self._end = len(data) if end is None else end
        self.position = position

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left."""
        return self.position >= self._end

    def take(self, num_bytes: int) -> bytes:
        """The next `num_bytes` bytes."""
        end = self.position + num_bytes
        if end > self._end:
            raise StepLogError("a record ends too early")
        taken = self._data[self.position : end]
        self.position = end
        return bytes(taken)

    def take_uint(self) -> int:
        """The inverse of `put_uint`."""
        value = shift = 0
        while True:
            if self.position >= self._end or shift > 63:
                raise StepLogError("a number has no end")
            byte = self._data[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def take_int(self) -> int:
        """The inverse of `put_int`."""
        value = self.take_uint()
        return -((value + 1) >> 1) if value & 1 else value >> 1

    def take_ints(self) -> list[int]:
        """The inverse of `put_ints`."""
        num_values = self.take_uint()
        if not num_values:
            return []
        typecode = chr(self.take(1)[0])
        if typecode not in _TYPECODES:
            raise StepLogError("an array has an unknown width")
        return unpack_ints(typecode, self.take(num_values * array(typecode).itemsize))
