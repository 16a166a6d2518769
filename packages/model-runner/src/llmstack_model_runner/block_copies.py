"""Moves blocks of KV storage as a step says: to the host, back from it, and from one block to another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_types import SchedulerOutput

KVStorage = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""


def apply_block_copies(scheduled: SchedulerOutput, storage: KVStorage, host_storage: KVStorage) -> None:
    """Performs a step's copies in their order: swap-outs, swap-ins, copies on the device.

    Raises:
        ValueError: A block lies outside of its storage; nothing has been copied.
    """
    pairs = (scheduled.swap_outs, scheduled.swap_ins, scheduled.block_copies)
    if not any(pairs):
        return
    num_blocks, num_host_blocks = _num_blocks(storage), _num_blocks(host_storage)
    _check(scheduled.swap_outs, num_blocks, num_host_blocks, "swap_outs")
    _check(scheduled.swap_ins, num_host_blocks, num_blocks, "swap_ins")
    _check(scheduled.block_copies, num_blocks, num_blocks, "block_copies")
    _copy(scheduled.swap_outs, storage, host_storage)
    _copy(scheduled.swap_ins, host_storage, storage)
    for independent in _independent_runs(scheduled.block_copies):
        _copy(independent, storage, storage)


def _copy(pairs: Sequence[tuple[int, int]], sources: KVStorage, destinations: KVStorage) -> None:
    """Copies pairs of which none reads, or writes, what another one writes."""
    if not pairs:
        return
    columns = torch.tensor(pairs, dtype=torch.int64).T  # [2, num_pairs]
    for layer_sources, layer_destinations in zip(sources, destinations, strict=True):
        for source, destination in zip(layer_sources, layer_destinations, strict=True):
            blocks = source[columns[0].to(source.device)]
            destination[columns[1].to(destination.device)] = blocks.to(destination.device)


def _independent_runs(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cuts the list where a pair reads or writes what an earlier one of its run has written."""
    runs: list[list[tuple[int, int]]] = [[]]
    written: set[int] = set()
    for source, destination in pairs:
        if written & {source, destination}:
            runs.append([])
            written.clear()
        runs[-1].append((source, destination))
        written.add(destination)
    return runs


def _check(pairs: Sequence[tuple[int, int]], num_sources: int, num_destinations: int, name: str) -> None:
    for source, destination in pairs:
        if not (0 <= source < num_sources and 0 <= destination < num_destinations):
            raise ValueError(f"{name} has a block outside of its storage: ({source}, {destination})")


def _num_blocks(storage: KVStorage) -> int:
    return storage[0][0].shape[0] if storage else 0
