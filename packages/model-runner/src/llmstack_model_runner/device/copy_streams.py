"""Streams of a device on which blocks travel while others compute, and the memory that they travel between."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch

from llmstack_model_runner.host_limits import available_memory_bytes
from llmstack_types import EngineStartError

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class Lane(Enum):
    """Where work is put: what is on one lane happens in order, lanes wait for each other by events only."""

    COMPUTE = "compute"
    TO_HOST = "to_host"
    FROM_HOST = "from_host"


class CopyStreams(Protocol):
    """The lanes of one device. The host waits for nothing but `synchronize`."""

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Puts work on a lane."""
        ...

    def record(self, lane: Lane) -> object:
        """An event that comes when all that is on the lane by now is over."""
        ...

    def wait(self, lane: Lane, event: object) -> None:
        """What is put on the lane from now on happens after the event."""
        ...

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Numbers for work on the compute lane: int64 [len(rows), len(rows[0])]."""
        ...

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """For as long as the streams live."""
        ...

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Which the device copies from and to by itself, for as long as the streams live.

        Raises:
            EngineStartError: There is not so much.
        """
        ...

    def close(self) -> None:
        """Waits for all copies and gives the memory of the host back."""
        ...


class CudaCopyStreams:
    """One GPU: computing is PyTorch's current stream, each direction has a stream of its own (and an engine that
    copies), so that a request that comes back does not wait for those that go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in (Lane.TO_HOST, Lane.FROM_HOST)}
        self._pinned: list[torch.Tensor] = []

    def run(self, lane: Lane, work: Callable[[], None]) -> None:
        """Launches it."""
        with torch.cuda.stream(self._stream(lane)):
            work()

    def record(self, lane: Lane) -> object:
        """A CUDA event."""
        return self._stream(lane).record_event()

    def wait(self, lane: Lane, event: object) -> None:
        """On the device alone."""
        if not isinstance(event, torch.cuda.Event):
            raise TypeError(f"{event!r} is no event of CUDA")
        self._stream(lane).wait_event(event)

    def indices(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """By pinned memory, which PyTorch hands out again once the copy is over."""
        return torch.tensor(rows, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)

    def device_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Taken on the compute stream; whoever uses it elsewhere orders that by events."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory that is then pinned: PyTorch's own pinned memory comes in powers of two only."""
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
        """As the protocol says; idempotent."""
        torch.cuda.synchronize(self._device)
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if lane is Lane.COMPUTE else self._streams[lane]


def _no_room(num_bytes: int, reason: str) -> EngineStartError:
    return EngineStartError(
        f"out of memory: the host blocks need {num_bytes} bytes ({reason}); lower --num-host-blocks"
    )
