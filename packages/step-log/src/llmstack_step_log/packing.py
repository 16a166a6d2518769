"""msgpack for the step log; every error is a `StepLogError`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_step_log.errors import StepLogError
from llmstack_step_log.primitives import pack_ints, unpack_ints

T = TypeVar("T")

pack: Callable[[Any], bytes] = msgpack.Packer(autoreset=True).pack
"""Builtins as msgpack; tuples become lists."""


def packed_ints(values: list[int]) -> Any:
    """A list of numbers that takes 2, 4 or 8 bytes each inside a packed value."""
    typecode, packed = pack_ints(values)
    return msgpack.ExtType(ord(typecode), packed)


def unpack(packed: bytes, kind: type[T]) -> T:
    """The inverse of `pack`.

    Raises:
        StepLogError: It is no msgpack, or no `kind`.
    """
    try:
        value = msgpack.unpackb(packed, ext_hook=_unpack_ints, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # a key may be a map
        raise StepLogError("a record cannot be read") from error
    if not isinstance(value, kind):
        raise StepLogError(f"a record holds no {kind.__name__}")
    return value


def _unpack_ints(code: int, packed: bytes) -> list[int]:
    return unpack_ints(chr(code), packed)
