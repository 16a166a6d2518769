"""Copy streams of a device, and the memory that they copy between."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch

from llmstack_model_runner.device.host_limits import available_memory_bytes
from llmstack_types import EngineStartError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class Lane(Enum):
    """A queue of work. Work of one lane runs in order; lanes wait for each other through events only."""

    COMPUTE = "compute"
    TO_HOST = "to_host"
    FROM_HOST = "from_host"


class CopyStreams(Protocol):
    """The lanes of one device. Only `close` blocks the host."""

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Starts work on a lane."""
        ...

    def record(self, lane: Lane) -> object:
        """An event that is reached when all work started on the lane so far is complete."""
        ...

    def wait(self, lane: Lane, event: object) -> None:
        """Makes work that is started on the lane from now on wait for the event."""
        ...

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Indices for work on the compute lane: int64 [len(rows), len(rows[0])]."""
        ...

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory that lives as long as the streams."""
        ...

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for asynchronous copies, which lives as long as the streams.

        Raises:
            EngineStartError: The host has not enough memory.
        """
        ...

    def close(self) -> None:
        """Waits for all copies and frees the host memory."""
        ...


class CudaCopyStreams:
    """Copy streams of one GPU.

    The compute lane is PyTorch's current stream. Each direction has its own stream and copy engine, so that swap-ins do
    not wait for swap-outs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in (Lane.TO_HOST, Lane.FROM_HOST)}
        self._pinned: list[torch.Tensor] = []

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream(lane)):
            work()

    def record(self, lane: Lane) -> object:
        return self._stream(lane).record_event()

    def wait(self, lane: Lane, event: object) -> None:
        """Makes the lane wait on the device, without blocking the host."""
        if not isinstance(event, torch.cuda.Event):
            raise TypeError(f"{event!r} is no event of CUDA")
        self._stream(lane).wait_event(event)

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Copied from pinned memory, which PyTorch's caching allocator reuses once the copy is complete."""
        return torch.tensor(rows, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocated on the compute stream; uses on other streams are ordered by events."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Anonymous memory that is then pinned: PyTorch rounds pinned memory up to powers of two."""
        num_bytes = math.prod(shape) * dtype.itemsize
        room = available_memory_bytes()
        if room is not None and num_bytes > room:
            raise _no_room(num_bytes, f"{room} are available")
        try:
            buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _no_room(num_bytes, error.strerror or "no memory") from error
        memory = torch.frombuffer(buffer, dtype=dtype).view(tuple(shape))
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, _PORTABLE))
        if code:
            raise _no_room(num_bytes, f"CUDA's error {code} on pinning them")
        self._pinned.append(memory)
        return memory

    def close(self) -> None:
        """Waits for all copies and frees the host memory. Idempotent."""
        torch.cuda.synchronize(self._device)
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if lane is Lane.COMPUTE else self._streams[lane]


def _no_room(num_bytes: int, reason: str) -> EngineStartError:
    return EngineStartError(
        f"out of memory: the host blocks need {num_bytes} bytes ({reason}); lower --num-host-blocks"
    )
