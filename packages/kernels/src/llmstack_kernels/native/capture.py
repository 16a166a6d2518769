"""Capture and replay of native calls, without Python and PyTorch between them.

In a decode step of few rows the overhead between operations matters: some 40 µs a layer in Python, against 300 µs for
a layer's weights. A replay reads and writes the memory of the captured calls, so new inputs are written into the
tensors of the first ones.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmstack_kernels.native import Float, Int, NativeLibrary, Pointer, require_library

_CHUNK_BYTES = 1 << 22
_ALIGNMENT = 64  # a line of the cache


class CaptureError(Exception):
    """The computation did work between the native calls that a replay would omit; the text names it."""


class Arena:
    """Memory for intermediate results; captures that never run at the same time may share it."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._index = 0
        self._offset = 0

    @property
    def num_bytes(self) -> int:
        return sum(chunk.numel() for chunk in self._chunks)

    def reset(self) -> None:
        """Makes all memory available again."""
        self._index = self._offset = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in memory that no other tensor since the last reset has."""
        num_bytes = math.prod(shape) * dtype.itemsize
        while True:
            if self._index == len(self._chunks):
                self._chunks.append(torch.empty(max(num_bytes, _CHUNK_BYTES), dtype=torch.uint8))
            chunk = self._chunks[self._index]
            if self._offset + num_bytes <= chunk.numel():
                break
            self._index, self._offset = self._index + 1, 0
        piece = chunk[self._offset : self._offset + num_bytes]
        self._offset += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece.view(dtype).view(list(shape))


class CapturedCalls:
    """Native calls in their order, ready to be replayed."""

    def __init__(self, native: NativeLibrary, arena: Arena) -> None:
        self._native = native
        self._arena = arena
        self._calls: list[tuple[str, list[int]]] = []
        self._packed_arguments: list[ctypes.Array[ctypes.c_char]] = []
        self._replay: Callable[[], None] | None = None
        self._buffers: object = None  # what a replay reads by its address

    def __len__(self) -> int:
        return len(self._calls)

    def wrap(self, name: str, function: Callable[..., None], types: tuple[type, ...]) -> Callable[..., None]:
        """`function` with each call captured."""

        def call(*arguments: Any) -> None:
            function(*arguments)
            self._calls.append((name, [self._word(value, kind) for value, kind in zip(arguments, types, strict=True)]))

        return call

    def replay(self) -> None:
        """Makes all calls again."""
        if self._replay is None:
            self._replay = self._make_replay()
        self._replay()

    def _word(self, value: Any, kind: type) -> int:
        if kind is Float:
            return int.from_bytes(struct.pack("<f", value), "little")
        if isinstance(value, bytes):  # arguments packed into a structure, of which a copy is kept
            self._packed_arguments.append(ctypes.create_string_buffer(value, len(value)))
            return ctypes.addressof(self._packed_arguments[-1])
        return int(value or 0)

    def _make_replay(self) -> Callable[[], None]:
        arguments = [(ctypes.c_int64 * len(words))(*words) for _, words in self._calls]
        entries = [
            word
            for (name, _), words in zip(self._calls, arguments, strict=True)
            for word in (self._native.address(f"{name}_with_words"), ctypes.addressof(words))
        ]
        table = (ctypes.c_int64 * len(entries))(*entries)
        self._buffers = arguments, table
        return partial(self._native.function("repeat", Pointer, Int), ctypes.addressof(table), len(self._calls))


@contextmanager
def capture(arena: Arena | None = None) -> Iterator[CapturedCalls]:
    """Captures the native calls made inside the context, which are executed as well.

    New tensors are allocated from the start of `arena`, so results of earlier captures with the same arena are lost.

    Raises:
        CaptureError: PyTorch was to compute something; only new tensors and views are allowed.
    """
    native = require_library()
    arena = arena or Arena()
    arena.reset()
    captured = CapturedCalls(native, arena)
    native.captures.current = captured
    try:
        with _OnlyViews(arena):
            yield captured
    finally:
        native.captures.current = None


class _OnlyViews(TorchDispatchMode):
    """Refuses operations of PyTorch that compute, and places new tensors in an arena."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's own
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to skip PyTorch's compiler it would be imported first, which takes 1.5 seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return _checked_view(func, func(*args, **kwargs), args[0])
        place = _PLACES.get(func)
        if place is None:
            raise CaptureError(f"PyTorch computes {func}")
        return self._arena.empty(*place(*args, **kwargs))


def _checked_view(func: Any, result: Any, source: torch.Tensor) -> Any:
    """`result`, unless it is a copy: `contiguous` and `reshape` make one if there is no view."""
    memory = source.untyped_storage().data_ptr()
    for view in [result] if isinstance(result, torch.Tensor) else result:
        if view.untyped_storage().data_ptr() != memory:
            raise CaptureError(f"PyTorch copies in {func}")
    return result


def _place(shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> tuple[Sequence[int], torch.dtype]:
    return shape, dtype or torch.get_default_dtype()


def _place_like(
    like: torch.Tensor, shape: Sequence[int] | None = None, *, dtype: torch.dtype | None = None, **_: Any
) -> tuple[Sequence[int], torch.dtype]:
    return like.shape if shape is None else shape, dtype or like.dtype


# What makes a tensor without a value, to the shape and type of it.
_PLACES: Mapping[Any, Callable[..., tuple[Sequence[int], torch.dtype]]] = {
    torch.ops.aten.empty.memory_format: _place,
    torch.ops.aten.empty_like.default: _place_like,
    torch.ops.aten.new_empty.default: _place_like,
}
