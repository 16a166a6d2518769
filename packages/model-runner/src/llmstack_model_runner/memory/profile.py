"""Memory profile of a GPU, measured by computing the largest steps once.

All memory in use on the device counts against the process's share, including that of other processes, so that several
processes with shares that add up to 1 fit. The memory of a step is the peak of PyTorch's reservations, fragmentation
included, plus what CUDA, cuBLAS and compiled kernels allocate outside PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from llmstack_model_runner.memory.kv_cache_groups import num_storage_tensors
from llmstack_types import KVCacheSpec

ALLOCATION_STEP = 2 << 20
"""PyTorch allocates memory for large tensors in multiples of this."""
GRAPH_BYTES_PER_SIZE = 16 << 20
"""Reserve for each captured number of rows, for CUDA's part of its up to four graphs. Not measured on a card yet."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory of a device at one moment.

    Attributes:
        free_bytes: Free memory of the device, available to any process.
        reserved_bytes: Memory that PyTorch has reserved in this process, in use or cached.
    """

    free_bytes: int
    reserved_bytes: int


class MemoryProbe(Protocol):
    """Reads a device's memory counters."""

    @property
    def total_bytes(self) -> int: ...

    def state(self) -> MemoryState:
        """The memory now, after all started work is complete."""
        ...

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """The most that PyTorch has reserved since `reset_peak`."""
        ...


class CudaMemoryProbe:
    """Memory counters of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        """Total memory as the driver reports it."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def state(self) -> MemoryState:
        """The memory now, after PyTorch's unused cache has been released."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return MemoryState(int(free_bytes), torch.cuda.memory_reserved(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory in use before the KV cache is allocated, and memory that steps need besides it.

    Attributes:
        used_bytes: In use with the weights loaded, by this process, CUDA and other processes.
        weight_bytes: The part of `used_bytes` that PyTorch uses in this process.
        step_bytes: The most that a step needs temporarily.
        graph_bytes: Reserve for captured graphs.
    """

    total_bytes: int
    used_bytes: int
    weight_bytes: int
    step_bytes: int
    graph_bytes: int

    def kv_bytes(self, utilization: float) -> int:
        """Memory left for the KV cache, given a share of the device."""
        return max(0, int(self.total_bytes * utilization) - self.used_bytes - self.step_bytes - self.graph_bytes)

    def table(self, utilization: float, bytes_per_block: int, block_size: int, max_model_len: int) -> Iterator[str]:
        """Lines of a table for the log."""
        kv_bytes = self.kv_bytes(utilization)
        num_blocks = kv_bytes // bytes_per_block
        num_tokens = num_blocks * block_size
        room = f"{num_blocks} blocks, {num_tokens} tokens, {num_tokens / max_model_len:.1f} requests of {max_model_len}"
        rows = (
            ("device", self.total_bytes, ""),
            ("share", int(self.total_bytes * utilization), f"{utilization:.0%} of the device"),
            ("weights", self.weight_bytes, ""),
            ("CUDA and others", self.used_bytes - self.weight_bytes, "other processes included"),
            ("largest step", self.step_bytes, "measured: activations, logits, workspaces"),
            ("captured graphs", self.graph_bytes, "reserve; none with --enforce-eager"),
            ("KV cache", kv_bytes, room),
        )
        yield "memory in GiB:"
        for name, num_bytes, note in rows:
            yield f"  {name:<16}{num_bytes / (1 << 30):>8.2f}  {note}".rstrip()


def graph_bytes(sizes: Sequence[int], vocab_size: int) -> int:
    """Reserve for captured steps of these numbers of rows, ascending, besides the measured largest one.

    Graphs share the memory of their tensors, except for the logits of rows that the host samples.
    """
    return len(sizes) * GRAPH_BYTES_PER_SIZE + (4 * sizes[-1] * vocab_size if sizes else 0)


def lost_bytes(spec: KVCacheSpec) -> int:
    """Memory on a GPU that the storage of the KV cache takes besides its blocks: rounding, and the scratch block."""
    return num_storage_tensors(spec) * ALLOCATION_STEP + spec.bytes_per_block + spec.bytes_per_state


def profile_memory(probe: MemoryProbe, run_largest_steps: Callable[[], int], reserve_bytes: int) -> MemoryProfile:
    """Computes the largest steps once and measures their memory.

    Args:
        probe: Counters of the device, which holds the weights already.
        run_largest_steps: Frees all it allocates; returns the bytes of its temporary KV storage.
        reserve_bytes: Reserve for captured graphs.
    """
    before = probe.state()
    probe.reset_peak()
    temporary_kv_bytes = run_largest_steps()
    peak_bytes = probe.peak_bytes() - before.reserved_bytes - temporary_kv_bytes
    after = probe.state()
    reserved_growth = after.reserved_bytes - before.reserved_bytes
    other_growth = before.free_bytes - after.free_bytes - reserved_growth
    return MemoryProfile(
        total_bytes=probe.total_bytes,
        used_bytes=probe.total_bytes - before.free_bytes,
        weight_bytes=before.reserved_bytes,
        step_bytes=max(0, peak_bytes) + max(0, other_growth),
        graph_bytes=reserve_bytes,
    )
