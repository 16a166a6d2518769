"""Device runtime: asynchronous copies and captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class GraphCaptureError(RuntimeError):
    """The device cannot capture the work, which runs correctly without a graph."""


class Transfer(Protocol):
    """A copy that has been started."""

    def wait(self) -> None:
        """Blocks until the copy is complete."""
        ...


class Fetched(Protocol):
    """Tensors whose copies to the host have been started."""

    def wait(self) -> list[torch.Tensor]:
        """Blocks until the copies are complete and returns the tensors, the same ones at each call."""
        ...


class Graph(Protocol):
    """Captured work that can be launched again as a whole."""

    def replay(self) -> None:
        """Launches the work again on the same memory, after all work that was started before."""
        ...


class DeviceRuntime(Protocol):
    """Starts work on a device without waiting for it. Work is executed in the order in which it was started.

    Attributes:
        device: The device of the model's tensors.
        graph_bytes: Memory that captured graphs use so far.
    """

    device: torch.device
    graph_bytes: int

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Host memory for asynchronous copies to the device: uint8 [num_bytes]."""
        ...

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """Starts a copy of staging memory to new device memory; the source must not change until it is complete."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Starts copies to the host, which overlap with later work; the tensors must never be written again."""
        ...

    def release_cached_memory(self) -> None:
        """Returns memory that no tensor uses to the device, so that graphs find it; to be called before captures."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Executes `work` once and captures it. The work must neither wait for the device nor read from it.

        Raises:
            torch.OutOfMemoryError: There is no memory for the graph; nothing was kept.
            GraphCaptureError: The work can be executed, but not captured.
        """
        ...


@dataclass(frozen=True, slots=True)
class _CudaTransfer:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(slots=True)
class _CudaFetched:
    """Keeps `sources` until the copies are complete, since PyTorch would reuse their memory for the next work."""

    event: torch.cuda.Event
    tensors: list[torch.Tensor]
    sources: Sequence[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        self.event.synchronize()
        self.sources = ()
        return self.tensors


class CudaRuntime:
    """Runtime of one GPU: work runs on PyTorch's current stream, copies of results on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph_bytes = 0
        self._results = torch.cuda.Stream(device)
        # Graphs run one after the other, so they can share the memory of their scratch tensors.
        self._pool = torch.cuda.graph_pool_handle()

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory: a copy from pageable memory would block the host until it is complete."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, source: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """Copies on the current stream, in order with the step that reads the result."""
        target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        target.copy_(source, non_blocking=True)
        return target, _CudaTransfer(torch.cuda.current_stream(self.device).record_event())

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        """Copies into pinned memory, which PyTorch's caching allocator reuses once the copy is complete."""
        self._results.wait_stream(torch.cuda.current_stream(self.device))
        hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        with torch.cuda.stream(self._results):
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
        return _CudaFetched(self._results.record_event(), hosts, tensors)

    def release_cached_memory(self) -> None:
        """Empties PyTorch's cache. The host waits for the device."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Executes the work once, so that kernels are compiled and workspaces allocated, and then captures it."""
        work()
        torch.cuda.synchronize(self.device)
        num_free_bytes, _ = torch.cuda.mem_get_info(self.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            # Other threads of the process may use the device meanwhile, for swaps or another engine's start.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except torch.OutOfMemoryError:
            torch.cuda.set_stream(stream)
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # PyTorch stays on the capture stream if the capture fails
            raise GraphCaptureError(str(error).partition("\n")[0]) from error
        self.graph_bytes += max(0, num_free_bytes - torch.cuda.mem_get_info(self.device)[0])
        return graph
