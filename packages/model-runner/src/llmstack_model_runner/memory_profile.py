"""What a GPU's memory goes to, found out by computing the largest steps once.

Everything in use on the device counts against the process's share, whoever uses it, so that several processes with
shares that add up to 1 fit. A step's need is the peak of what PyTorch reserves, which holds what is lost between
tensors, and what CUDA, cuBLAS and compiled kernels take beside PyTorch meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

ALLOCATION_STEP = 2 << 20
"""PyTorch takes memory for large tensors in multiples of this."""
GRAPH_BYTES_PER_SIZE = 16 << 20
"""Kept free for each number of rows whose steps are recorded, for what CUDA holds of its up to four recordings. Not
measured on a card yet."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """A moment.

    Attributes:
        free_bytes: Of the device, for whoever comes.
        reserved_bytes: By PyTorch in this process, in tensors or for later ones.
    """

    free_bytes: int
    reserved_bytes: int


class MemoryProbe(Protocol):
    """Looks at a device's memory."""

    @property
    def total_bytes(self) -> int:
        """Of the device."""
        ...

    def state(self) -> MemoryState:
        """Now, after all work that was started."""
        ...

    def reset_peak(self) -> None:
        """`peak_bytes` begins anew."""
        ...

    def peak_bytes(self) -> int:
        """The most that PyTorch had reserved since then."""
        ...


class CudaMemoryProbe:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        """As the driver says."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def state(self) -> MemoryState:
        """What PyTorch merely keeps for later is given back first."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return MemoryState(int(free_bytes), torch.cuda.memory_reserved(self._device))

    def reset_peak(self) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """As `torch.cuda.max_memory_reserved`."""
        return torch.cuda.max_memory_reserved(self._device)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What is in use before there is a KV cache, and what steps will need beside one.

    Attributes:
        used_bytes: In use with the weights loaded: those, CUDA itself, and other processes.
        weight_bytes: Those of them that are PyTorch's in this process.
        step_bytes: The most that a step takes for a while.
        graph_bytes: Kept free for recorded steps.
    """

    total_bytes: int
    used_bytes: int
    weight_bytes: int
    step_bytes: int
    graph_bytes: int

    def kv_bytes(self, utilization: float) -> int:
        """What is left for the KV cache of a share of the device."""
        return max(0, int(self.total_bytes * utilization) - self.used_bytes - self.step_bytes - self.graph_bytes)

    def table(self, utilization: float, bytes_per_block: int, block_size: int, max_model_len: int) -> Iterator[str]:
        """Lines for the log."""
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
            ("recorded steps", self.graph_bytes, "kept free; --enforce-eager needs none"),
            ("KV cache", kv_bytes, room),
        )
        yield "memory in GiB:"
        for name, num_bytes, note in rows:
            yield f"  {name:<16}{num_bytes / (1 << 30):>8.2f}  {note}".rstrip()


def graph_bytes(sizes: Sequence[int], vocab_size: int) -> int:
    """What recorded steps of these numbers of rows, ascending, may take beside what the largest of them was seen to.

    They share the memory of their tensors, but for the logits of rows whose sampling the host has a part in.
    """
    return len(sizes) * GRAPH_BYTES_PER_SIZE + (4 * sizes[-1] * vocab_size if sizes else 0)


def profile_memory(probe: MemoryProbe, run_largest_steps: Callable[[], int], reserve_bytes: int) -> MemoryProfile:
    """Computes the largest steps once and looks what that takes.

    Args:
        probe: Of the device that the weights lie on already.
        run_largest_steps: Leaves nothing behind; returns the bytes of the temporary KV storage it took.
        reserve_bytes: To be kept free for recorded steps.
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
