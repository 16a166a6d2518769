"""What the runner needs of a device that computes on its own: copies that nobody waits for, and recorded work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class NotRecordableError(RuntimeError):
    """The device refused to record the work; nothing else is wrong with it."""


class Transfer(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Returns once the copy is over."""
        ...


class Fetched(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there; the same each time."""
        ...


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Does the work once more, on the same memory, in order with what was started before."""
        ...


class DeviceRuntime(Protocol):
    """All work is started in one order, and happens in it; the host goes on at once.

    Attributes:
        device: Where tensors of the model lie.
        graph_bytes: Memory that recordings have taken so far.
    """

    device: torch.device
    graph_bytes: int

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory that copies to the device can read while the host goes on: uint8 [num_bytes]."""
        ...

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """Starts a copy of staging memory to new memory of the device; the source must not change until it is over."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Starts copies to the host, beside what is started later; the tensors must never be written again."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Records `work`, which must not wait for the device nor read anything from it. It is carried out as well.

        Raises:
            torch.OutOfMemoryError: There is no room for it; nothing has been kept.
            NotRecordableError: The work can be done, but not recorded.
        """
        ...


@dataclass(frozen=True, slots=True)
class _CudaTransfer:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(slots=True)
class _CudaFetched:
    """`sources` are kept until the copies are over: their memory would be given to what is started next."""

    event: torch.cuda.Event
    tensors: list[torch.Tensor]
    sources: Sequence[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        self.event.synchronize()
        self.sources = ()
        return self.tensors


class CudaRuntime:
    """One GPU. Work is started on PyTorch's current stream, results travel on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph_bytes = 0
        self._results = torch.cuda.Stream(device)
        # Recordings are repeated one after the other, so that one may use the memory of another's scratch tensors.
        self._pool = torch.cuda.graph_pool_handle()

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Pinned: a copy from other memory would make the host wait until it is over."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """One copy, in order with the step that reads it."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        target.copy_(source, non_blocking=True)
        return target, _CudaTransfer(torch.cuda.current_stream(self.device).record_event())

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Copies into pinned memory, which PyTorch keeps and hands out again once the copy is over."""
        self._results.wait_stream(torch.cuda.current_stream(self.device))
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        with torch.cuda.stream(self._results):
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
        return _CudaFetched(self._results.record_event(), hosts, tensors)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Carries the work out once, so that everything is compiled and has its workspaces, and then records it."""
        work()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        num_free_bytes, _ = torch.cuda.mem_get_info(self.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads of the process may use the device meanwhile: swaps, another engine's start.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except torch.OutOfMemoryError:
            torch.cuda.set_stream(stream)
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # PyTorch stays on the recording's own if that cannot be ended
            raise NotRecordableError(str(error).partition("\n")[0]) from error
        self.graph_bytes += max(0, num_free_bytes - torch.cuda.mem_get_info(self.device)[0])
        return graph
