"""Header of a GGUF file: its metadata, and where its tensors are.

The format is described in the documentation of ggml (`docs/gguf.md`). Every count, length and offset is checked before
it is used, since a file may come from anywhere.
"""

from __future__ import annotations

import math
import mmap
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from llmstack_gguf.tensor_types import TENSOR_TYPES, UNSUPPORTED_TYPES, TensorType

Value: TypeAlias = "bool | int | float | str | list[str] | array[int] | array[float]"

MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_ARRAY_LENGTH = 1 << 22
MAX_STRING_BYTES = 1 << 20
_MAX_NAME_BYTES = 256
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16
_MAX_ELEMENTS = 1 << 42
_VERSIONS = (2, 3)
_GIT_LFS_START = b"version https://git-lfs"
_LENGTH = struct.Struct("<Q")
_TOO_LONG = "it ends inside its header, or the header is too long."

# Type code of a value to its format for `struct`; 7 is bool, 8 a string and 9 an array.
_NUMBERS: Mapping[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class GGUFError(ValueError):
    """The file is damaged or not supported; the text says why in one sentence."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor.

    Attributes:
        shape: As PyTorch writes it: rows first. The file has the opposite order.
        type: How its numbers are stored.
        start: Offset of its first byte in the file.
        num_bytes: Length of its data.
        file: Number of its file, where the model has several.
    """

    shape: tuple[int, ...]
    type: TensorType
    start: int
    num_bytes: int
    file: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    Attributes:
        metadata: Key to value; arrays of numbers are `array.array`.
        tensors: Name to place.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        """`general.architecture`, such as `llama`; empty where the file has none."""
        found = self.metadata.get("general.architecture")
        return found if isinstance(found, str) else ""


def read_header(path: Path) -> Header:
    """Reads and checks the header; the data is not read.

    Raises:
        GGUFError: The file is damaged, truncated or not supported.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(len(_GIT_LFS_START))
        if start == _GIT_LFS_START:
            raise GGUFError(f"{path.name} is a pointer of Git LFS and not the file itself; run git lfs pull.")
        if size < 24 or start[:4] != b"GGUF":
            raise GGUFError(f"{path.name} is no GGUF file.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            try:
                return _read(_Cursor(view, min(size, MAX_HEADER_BYTES)), size)
            except GGUFError as error:
                raise GGUFError(f"{path.name} cannot be read as GGUF: {error}") from None


class _Cursor:
    """Reads values one after another; nothing behind `end` is touched."""

    def __init__(self, view: mmap.mmap, end: int) -> None:
        self._view = view
        self._end = end
        self.place = 4

    def take(self, size: int) -> int:
        """The place of the next `size` bytes, which are skipped."""
        if size > self._end - self.place:
            raise GGUFError(_TOO_LONG)
        start = self.place
        self.place = start + size
        return start

    def number(self, code: str) -> int | float:
        value: int | float = struct.unpack_from(f"<{code}", self._view, self.take(struct.calcsize(f"<{code}")))[0]
        return value

    def count(self, limit: int, what: str) -> int:
        found = int(self.number("Q"))
        if found > limit:
            raise GGUFError(f"it has {found} {what}, more than {limit}.")
        return found

    def text(self, limit: int = MAX_STRING_BYTES) -> str:
        return self._texts(1, limit)[0]

    def _texts(self, number: int, limit: int) -> list[str]:
        """As `count` and `take` for each would read them, in a loop without calls: vocabularies have 100,000 texts."""
        view, end, place, size_of = self._view, self._end, self.place, _LENGTH.unpack_from
        texts = []
        try:
            for _ in range(number):
                start = place + _LENGTH.size
                if start > end:
                    raise GGUFError(_TOO_LONG)
                size = size_of(view, place)[0]
                if size > limit:
                    raise GGUFError(f"it has {size} bytes in a text, more than {limit}.")
                place = start + size
                if place > end:
                    raise GGUFError(_TOO_LONG)
                texts.append(view[start:place].decode())
        except UnicodeDecodeError:
            raise GGUFError("a text is no UTF-8.") from None
        self.place = place
        return texts

    def value(self) -> Value:
        kind = int(self.number("I"))
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self.text()
        if kind not in _NUMBERS:
            raise GGUFError(f"there is no value of type {kind}.")
        number = self.number(_NUMBERS[kind])
        return bool(number) if kind == _BOOL else number

    def _array(self) -> Value:
        kind, length = int(self.number("I")), self.count(MAX_ARRAY_LENGTH, "entries in an array")
        if kind == _STRING:
            return self._texts(length, MAX_STRING_BYTES)
        if kind not in _NUMBERS:
            raise GGUFError(f"there is no array of values of type {kind}.")
        numbers = array(_NUMBERS[kind])
        start = self.take(length * numbers.itemsize)
        numbers.frombytes(self._view[start : start + length * numbers.itemsize])
        return numbers


def _read(cursor: _Cursor, file_size: int) -> Header:
    version = int(cursor.number("I"))
    if version not in _VERSIONS:
        raise GGUFError(f"version {version} is not supported; 2 and 3, little-endian, are.")
    num_tensors = cursor.count(MAX_TENSORS, "tensors")
    metadata: dict[str, Value] = {}
    for _ in range(cursor.count(MAX_KEYS, "keys")):
        key = cursor.text(_MAX_NAME_BYTES)
        if key in metadata:
            raise GGUFError(f"the key {key!r} is doubled.")
        metadata[key] = cursor.value()
    found: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text(_MAX_NAME_BYTES)
        if name in found:
            raise GGUFError(f"the tensor {name!r} is doubled.")
        found[name] = _read_tensor(cursor, name)
    alignment = _alignment(metadata)
    data_start = -(-cursor.place // alignment) * alignment
    return Header(metadata, _placed(found, data_start, alignment, file_size))


def _read_tensor(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], TensorType, int]:
    num_dimensions = int(cursor.number("I"))
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise GGUFError(f"{name!r} has {num_dimensions} dimensions.")
    sizes = [int(cursor.number("Q")) for _ in range(num_dimensions)]
    if min(sizes) < 1 or max(sizes) > _MAX_ELEMENTS or math.prod(sizes) > _MAX_ELEMENTS:
        raise GGUFError(f"{name!r} has an impossible shape.")
    code = int(cursor.number("I"))
    if code not in TENSOR_TYPES:
        raise GGUFError(f"{name!r} has the type {UNSUPPORTED_TYPES.get(code, code)}; {_supported()} are supported.")
    kind = TENSOR_TYPES[code]
    if sizes[0] % kind.block_size:
        raise GGUFError(f"{name!r} has rows of {sizes[0]} numbers, which are no blocks of {kind.name}.")
    return tuple(reversed(sizes)), kind, int(cursor.number("Q"))


def _supported() -> str:
    return ", ".join(kind.name for kind in TENSOR_TYPES.values())


def _alignment(metadata: Mapping[str, Value]) -> int:
    found = metadata.get("general.alignment", 32)
    if type(found) is not int or not 8 <= found <= _MAX_ALIGNMENT or found & (found - 1):
        raise GGUFError("general.alignment is no power of two from 8 to 65536.")
    return found


def _placed(
    found: Mapping[str, tuple[tuple[int, ...], TensorType, int]], data_start: int, alignment: int, file_size: int
) -> dict[str, TensorInfo]:
    """Places of tensors, which must be aligned, inside the file and apart from each other."""
    placed: dict[str, TensorInfo] = {}
    end = data_start
    for name, (shape, kind, offset) in sorted(found.items(), key=lambda entry: entry[1][2]):
        start, num_bytes = data_start + offset, math.prod(shape) // kind.block_size * kind.block_bytes
        if offset % alignment or start < end:
            raise GGUFError(f"{name!r} is not aligned, or overlaps another tensor.")
        end = start + num_bytes
        if end > file_size:
            raise GGUFError(f"{name!r} goes beyond the end of the file, which may be truncated.")
        placed[name] = TensorInfo(shape, kind, start, num_bytes)
    return placed
