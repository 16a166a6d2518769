"""Swap copies that overlap with computation on the device.

A block consists of a piece per tensor of each layer, such as keys and values: 64 pieces of 32 KB for Llama 3 8B, far
too small for the bus. So the pieces are gathered into staging memory on the device, with one or two launches per tensor
for any number of blocks. There a block is one piece (2 MB), and the host stores blocks in that form. Neighbouring host
blocks are copied together.

The compute lane gathers and scatters in order with the steps. It waits for swap-ins; it waits for swap-outs only if
staging memory runs out. A swap-in waits for the swap-out that wrote its host block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from llmstack_model_runner.device.streams import CopyStreams, CudaCopyStreams, Lane
from llmstack_model_runner.memory.block_copies import (
    BlockCopies,
    DirectBlockCopies,
    KVStorage,
    Pairs,
    check_copies,
    copy_rows,
    flat_storage,
    independent_runs,
    num_blocks_of,
)
from llmstack_model_runner.memory.kv_cache_groups import allocate_storage
from llmstack_types import KVCacheSpec, SchedulerOutput

_STAGING_BYTES = 32 << 20
"""Size of each of four staging buffers: a copy takes half a millisecond on the bus, so launch costs are negligible."""


class _Staging:
    """Device memory for some blocks; after the event `is_free` it may be written again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.is_free: object | None = None


class StreamedBlockCopies:
    """Implements `BlockCopies` with asynchronous copies for a storage on a device."""

    def __init__(
        self, storage: KVStorage, num_host_blocks: int, streams: CopyStreams, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        """Allocates `num_host_blocks` blocks of host memory, and staging memory if there are any.

        Raises:
            EngineStartError: The host has not enough memory.
        """
        self._storage = flat_storage(storage)
        self._streams = streams
        self._num_host_blocks = num_host_blocks if self._storage else 0
        self._written: dict[int, object] = {}  # host block to the event of its last write
        self._out: list[_Staging] = []
        self._in: list[_Staging] = []
        if self._num_host_blocks:
            first = self._storage[0]
            size = sum(tensor[0].numel() for tensor in self._storage)
            self._host = streams.host_memory((num_host_blocks, size), first.dtype)
            self._max_num_staged = max(1, staging_bytes // (size * first.element_size()))
            staging_shape = (min(self._max_num_staged, num_host_blocks), size)
            self._out, self._in = (
                [_Staging(streams.device_memory(staging_shape, first.dtype)) for _ in range(2)] for _ in range(2)
            )

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Starts a step's copies; later work on the compute lane sees their results."""
        check_copies(scheduled, num_blocks_of(self._storage), self._num_host_blocks)
        for pairs in self._chunks(scheduled.swap_outs):
            self._send(pairs)
        for pairs in self._chunks(scheduled.swap_ins):
            self._copy_back(pairs)
        for independent in independent_runs(scheduled.block_copies):
            if independent:
                self._copy_on_device(independent)

    def close(self) -> None:
        self._streams.close()
        self._written.clear()
        self._out, self._in = [], []

    def _send(self, pairs: Pairs) -> None:
        """Starts swap-outs, pairs of (block, host block): gathers in order with the steps, then copies to the host."""
        streams, staging = self._streams, _rotate(self._out)
        if staging.is_free is not None:
            streams.wait(Lane.COMPUTE, staging.is_free)
        staged = staging.memory[: len(pairs)]
        columns = streams.indices([[block for block, _ in pairs]])
        streams.run(Lane.COMPUTE, lambda: self._gather(columns[0], staged))
        streams.wait(Lane.TO_HOST, streams.record(Lane.COMPUTE))
        host_blocks = [host_block for _, host_block in pairs]
        streams.run(Lane.TO_HOST, lambda: _copy_runs(host_blocks, self._host, staged, is_to_host=True))
        staging.is_free = streams.record(Lane.TO_HOST)
        self._written.update(dict.fromkeys(host_blocks, staging.is_free))

    def _copy_back(self, pairs: Pairs) -> None:
        """Starts swap-ins, pairs of (host block, block): copies, then scatters in order with the steps."""
        streams, staging = self._streams, _rotate(self._in)
        host_blocks = [host_block for host_block, _ in pairs]
        awaited = [staging.is_free, *(self._written.pop(host_block, None) for host_block in host_blocks)]
        for event in {id(event): event for event in awaited if event is not None}.values():
            streams.wait(Lane.FROM_HOST, event)
        staged = staging.memory[: len(pairs)]
        streams.run(Lane.FROM_HOST, lambda: _copy_runs(host_blocks, self._host, staged, is_to_host=False))
        streams.wait(Lane.COMPUTE, streams.record(Lane.FROM_HOST))
        columns = streams.indices([[block for _, block in pairs]])
        streams.run(Lane.COMPUTE, lambda: self._scatter(columns[0], staged))
        staging.is_free = streams.record(Lane.COMPUTE)

    def _copy_on_device(self, pairs: Pairs) -> None:
        columns = self._streams.indices([[source for source, _ in pairs], [target for _, target in pairs]])
        self._streams.run(Lane.COMPUTE, lambda: copy_rows(columns, self._storage, self._storage))

    def _gather(self, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        for tensor, piece in self._pieces(staged):
            piece.copy_(tensor.index_select(0, blocks))

    def _scatter(self, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        for tensor, piece in self._pieces(staged):
            tensor.index_copy_(0, blocks, piece)

    def _pieces(self, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor of the storage, and its part of the staged blocks in the same shape."""
        sizes = [tensor[0].numel() for tensor in self._storage]
        for tensor, piece in zip(self._storage, staged.split(sizes, dim=1), strict=True):
            yield tensor, piece.unflatten(1, tensor.shape[1:])

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        """Splits the pairs into parts that fit into staging memory."""
        for start in range(0, len(pairs), self._max_num_staged) if pairs else ():
            yield pairs[start : start + self._max_num_staged]


def _rotate(stagings: list[_Staging]) -> _Staging:
    """The least recently used buffer."""
    stagings.append(stagings.pop(0))
    return stagings[-1]


def _copy_runs(host_blocks: list[int], host: torch.Tensor, staged: torch.Tensor, *, is_to_host: bool) -> None:
    """One copy for each run of neighbouring host blocks; place i of `staged` belongs to `host_blocks[i]`."""
    for _, run in groupby(enumerate(host_blocks), key=lambda entry: entry[1] - entry[0]):
        entries = list(run)
        (start, first), size = entries[0], len(entries)
        pieces = (host[first : first + size], staged[start : start + size])
        destination, source = pieces if is_to_host else pieces[::-1]
        destination.copy_(source, non_blocking=True)


def make_block_copies(storage: KVStorage, spec: KVCacheSpec, num_host_blocks: int, device: torch.device) -> BlockCopies:
    """The copies between blocks of a storage, and `num_host_blocks` further ones in host memory."""
    if device.type == "cuda":
        return StreamedBlockCopies(storage, num_host_blocks, CudaCopyStreams(device))
    return DirectBlockCopies(storage, allocate_storage(spec, num_host_blocks, "cpu") if num_host_blocks else [])
