"""Sums, gathers and messages between processes of one host, over shared memory.

All members map the same zeroed memory. Waiting is a spin of 50 µs at most, then a sleep in the kernel. The calls are
native, so steps that contain them can be captured.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence

import torch

from llmstack_kernels.native import DTYPE_TO_SUFFIX, Int, NativeLibrary, Pointer, require_library

SLOT_BYTES = 1 << 20
LINK_SLOT_BYTES = 1 << 16
_LINE = 64

_STATUS_TO_REASON: Mapping[int, str] = {
    1: "another rank did not reach the same point in time",
    2: "another rank has ended or given up",
}


class CollectiveError(RuntimeError):
    """The ranks can no longer exchange data; the step and all later ones are lost."""


class _Member(ctypes.Structure):
    _fields_ = (
        ("shared", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("sequence", ctypes.c_int64),
        ("status", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
    )


class _Shared:
    """Memory that several processes have mapped, and one rank's place in it."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, slot_bytes: int, timeout_s: float) -> None:
        self._native: NativeLibrary = require_library()
        self._memory = memory  # has to stay mapped
        self._view = ctypes.c_char.from_buffer(memory)
        timeout_ns = int(timeout_s * 1e9)
        self._member = _Member(ctypes.addressof(self._view), rank, size, slot_bytes, 0, 0, timeout_ns)
        self._pointer = ctypes.addressof(self._member)

    def set_timeout(self, timeout_s: float) -> None:
        """Limits each later wait for another rank."""
        self._member.timeout_ns = int(timeout_s * 1e9)

    def abort(self) -> None:
        """Ends the waits of all ranks, also of later calls; from any thread."""
        self._native.function("abort_group", Pointer)(self._pointer)

    def check(self) -> None:
        """Raises CollectiveError if a call has failed, also one that was replayed: its results are worthless."""
        status = int(self._member.status)
        if status:
            raise CollectiveError(_STATUS_TO_REASON[status])


class SharedGroup(_Shared):
    """One rank of a group that sums and gathers; all make the same calls in the same order."""

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, *, slot_bytes: int = SLOT_BYTES, timeout_s: float = 60.0
    ) -> None:
        """`memory` has `num_bytes(size, slot_bytes)` bytes, which were zeros before the first rank's first call."""
        super().__init__(memory, rank, size, slot_bytes, timeout_s)
        self._widths_to_offsets: dict[tuple[int, ...], ctypes.Array[ctypes.c_int64]] = {}

    @staticmethod
    def num_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
        """Memory of a group of `size` ranks."""
        return (1 + size) * _LINE + 2 * size * slot_bytes

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place: in float32, in the order of the ranks, rounded once.

        Raises:
            CollectiveError: A rank is missing.
        """
        if not tensor.is_contiguous() or tensor.dtype not in DTYPE_TO_SUFFIX:
            raise ValueError(f"a contiguous tensor of floats is needed, got {tensor.dtype}, {tuple(tensor.shape)}.")
        function = self._native.function(f"all_reduce_{DTYPE_TO_SUFFIX[tensor.dtype]}", Pointer, Pointer, Int)
        function(self._pointer, tensor.data_ptr(), tensor.numel())
        self.check()
        return tensor

    def all_gather(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Columns of all ranks beside each other: [n, widths[rank]] to [n, sum(widths)].

        Raises:
            CollectiveError: A rank is missing.
        """
        num_rows, item_bytes = columns.shape[0], columns.element_size()
        if max(widths) * item_bytes > self._member.slot_bytes or not columns.is_contiguous():
            raise ValueError(f"rows of {max(widths) * item_bytes} bytes do not fit into {self._member.slot_bytes}.")
        out = columns.new_empty((num_rows, sum(widths)))
        function = self._native.function("all_gather", Pointer, Pointer, Pointer, Int, Pointer)
        offsets = self._offsets(tuple(width * item_bytes for width in widths))
        function(self._pointer, columns.data_ptr(), out.data_ptr(), num_rows, ctypes.addressof(offsets))
        self.check()
        return out

    def _offsets(self, widths: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
        """Kept, since captured calls refer to them; a model has one or two widths."""
        found = self._widths_to_offsets.get(widths)
        if found is None:
            starts = [sum(widths[:rank]) for rank in range(len(widths) + 1)]
            found = self._widths_to_offsets[widths] = (ctypes.c_int64 * len(starts))(*starts)
        return found


class SharedLink(_Shared):
    """One end of a link from a sender to a receiver: tensors arrive in the order in which they are sent."""

    def __init__(
        self,
        memory: mmap.mmap,
        *,
        is_sender: bool,
        num_slots: int,
        slot_bytes: int = LINK_SLOT_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        """`memory` has `num_bytes(num_slots, slot_bytes)` bytes, which were zeros before the first call."""
        super().__init__(memory, 0 if is_sender else 1, 2, slot_bytes, timeout_s)
        self._num_slots = num_slots

    @staticmethod
    def num_bytes(num_slots: int, slot_bytes: int = LINK_SLOT_BYTES) -> int:
        """Memory of a link that holds `num_slots` pieces of up to `slot_bytes` bytes."""
        return 3 * _LINE + num_slots * slot_bytes

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a contiguous tensor; waits only while the link is full.

        Raises:
            CollectiveError: The receiver is missing.
        """
        self._call("link_send", tensor)

    def receive(self, tensor: torch.Tensor) -> None:
        """Fills a contiguous tensor with the next one that was sent, which has the same size.

        Raises:
            CollectiveError: The sender is missing.
        """
        self._call("link_receive", tensor)

    def _call(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError("only contiguous tensors can be sent and received.")
        function = self._native.function(name, Pointer, Pointer, Int, Int)
        function(self._pointer, tensor.data_ptr(), tensor.numel() * tensor.element_size(), self._num_slots)
        self.check()
