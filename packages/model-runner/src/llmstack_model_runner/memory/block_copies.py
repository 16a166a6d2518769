"""Copies of KV blocks: swap-outs, swap-ins, and copies on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from llmstack_types import SchedulerOutput

Pairs = Sequence[tuple[int, int]]
KVStorage = Sequence[tuple[torch.Tensor, ...]]
"""The tensors of each layer, each [num_blocks, ...] with the shape of one block behind it."""

_SIZE_TO_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class BlockCopies(Protocol):
    """Performs the block copies of a step."""

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Performs a step's copies in their order: swap-outs, swap-ins, copies on the device.

        Raises:
            ValueError: A block lies outside of its storage; nothing has been copied.
        """
        ...

    def close(self) -> None:
        """Waits for started copies and frees memory. No call may follow."""
        ...


class DirectBlockCopies:
    """Synchronous copies between two storages in host memory, for a CPU."""

    def __init__(self, storage: KVStorage, host_storage: KVStorage) -> None:
        """`host_storage` is empty if there are no host blocks."""
        self._storage = flat_storage(storage)
        self._host_storage = flat_storage(host_storage)

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Performs the copies, which are complete on return."""
        check_copies(scheduled, num_blocks_of(self._storage), num_blocks_of(self._host_storage))
        _copy(scheduled.swap_outs, self._storage, self._host_storage)
        _copy(scheduled.swap_ins, self._host_storage, self._storage)
        for independent in independent_runs(scheduled.block_copies):
            _copy(independent, self._storage, self._storage)

    def close(self) -> None:
        """Does nothing, since all copies are complete."""


def flat_storage(storage: KVStorage) -> list[torch.Tensor]:
    """The tensors of all layers in one list, viewed as integers of one type: not every float type can be gathered."""
    tensors = [tensor for layer in storage for tensor in layer]
    sizes = {tensor.element_size() for tensor in tensors}
    integers = _SIZE_TO_INTEGERS[sizes.pop() if len(sizes) == 1 else 1]
    return [tensor.view(integers) for tensor in tensors]


def num_blocks_of(storage: Sequence[torch.Tensor]) -> int:
    """Number of blocks in a flat storage."""
    return storage[0].shape[0] if storage else 0


def check_copies(scheduled: SchedulerOutput, num_blocks: int, num_host_blocks: int) -> None:
    """Raises ValueError, which names the list, if a block lies outside its storage."""
    _check(scheduled.swap_outs, num_blocks, num_host_blocks, "swap_outs")
    _check(scheduled.swap_ins, num_host_blocks, num_blocks, "swap_ins")
    _check(scheduled.block_copies, num_blocks, num_blocks, "block_copies")


def independent_runs(pairs: Pairs) -> list[list[tuple[int, int]]]:
    """Splits the list before each pair that reads or writes a block written earlier in its run."""
    runs: list[list[tuple[int, int]]] = [[]]
    written: set[int] = set()
    for source, destination in pairs:
        if written & {source, destination}:
            runs.append([])
            written.clear()
        runs[-1].append((source, destination))
        written.add(destination)
    return runs


def copy_rows(columns: torch.Tensor, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    """Copies pairs that are independent of each other. `columns`: int64 [2, num_pairs]."""
    for source, destination in zip(sources, destinations, strict=True):
        destination.index_copy_(0, columns[1], source.index_select(0, columns[0]))


def _copy(pairs: Pairs, sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor]) -> None:
    if pairs:
        copy_rows(torch.tensor(pairs, dtype=torch.int64).T, sources, destinations)


def _check(pairs: Pairs, num_sources: int, num_destinations: int, name: str) -> None:
    for source, destination in pairs:
        if not (0 <= source < num_sources and 0 <= destination < num_destinations):
            raise ValueError(f"{name} has a block outside of its storage: ({source}, {destination})")
