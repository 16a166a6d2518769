"""Copies of blocks that travel to the host and back while the device computes.

A block lies in as many pieces as there are layers, twice (keys, values): 64 of 32 KB for a Llama 3 8B, far too small
for the bus. So the pieces are gathered on the device into staging memory, a launch or two per tensor whatever the
number of blocks, where a block is one piece (2 MB there), and the host keeps blocks in that form. Neighbouring host
blocks go in one copy.

The compute lane gathers and scatters, in order with the steps: it waits for what comes back, and for what goes only
where staging memory runs out. What comes back waits for the copy that brought it to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from llmstack_model_runner.block_copies import (
    KVStorage,
    Pairs,
    check_copies,
    copy_rows,
    flat_storage,
    independent_runs,
    num_blocks_of,
)
from llmstack_model_runner.device.copy_streams import CopyStreams, Lane
from llmstack_types import SchedulerOutput

_STAGING_BYTES = 32 << 20
"""Of each of four: enough that a copy takes half a millisecond on the bus, beside which a launch is nothing."""


class _Staging:
    """Memory of the device for some blocks; `is_free` is the event after which it may be written again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.is_free: object | None = None


class StreamedBlockCopies:
    """As `BlockCopies`, for a storage on a device."""

    def __init__(
        self, storage: KVStorage, num_host_blocks: int, streams: CopyStreams, staging_bytes: int = _STAGING_BYTES
    ) -> None:
        """Takes `num_host_blocks` blocks of the host's memory, and staging memory where that is any.

        Raises:
            EngineStartError: The host has not so much.
        """
        self._storage = flat_storage(storage)
        self._streams = streams
        self._num_host_blocks = num_host_blocks if self._storage else 0
        self._written: dict[int, object] = {}  # host block to the event that comes when it is there
        self._out: list[_Staging] = []
        self._in: list[_Staging] = []
        if self._num_host_blocks:
            first = self._storage[0]
            shape = (len(self._storage), *first.shape[1:])
            self._host = streams.host_memory((num_host_blocks, *shape), first.dtype)
            self._max_num_staged = max(1, staging_bytes // (self._host[0].numel() * first.element_size()))
            staging_shape = (min(self._max_num_staged, num_host_blocks), *shape)
            self._out, self._in = (
                [_Staging(streams.device_memory(staging_shape, first.dtype)) for _ in range(2)] for _ in range(2)
            )

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Starts a step's copies; what is put on the compute lane from now on happens after those that it may see."""
        check_copies(scheduled, num_blocks_of(self._storage), self._num_host_blocks)
        for pairs in self._chunks(scheduled.swap_outs):
            self._send(pairs)
        for pairs in self._chunks(scheduled.swap_ins):
            self._bring_back(pairs)
        for independent in independent_runs(scheduled.block_copies):
            if independent:
                self._copy_on_device(independent)

    def close(self) -> None:
        """As `BlockCopies.close`."""
        self._streams.close()
        self._written.clear()
        self._out, self._in = [], []

    def _send(self, pairs: Pairs) -> None:
        """(block, host block): gathered in order with the steps, then off to the host."""
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

    def _bring_back(self, pairs: Pairs) -> None:
        """(host block, block): from the host as soon as it is there, then scattered in order with the steps."""
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
        for index, tensor in enumerate(self._storage):
            staged[:, index].copy_(tensor.index_select(0, blocks))

    def _scatter(self, blocks: torch.Tensor, staged: torch.Tensor) -> None:
        for index, tensor in enumerate(self._storage):
            tensor.index_copy_(0, blocks, staged[:, index])

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        """As much as staging memory holds at a time."""
        for start in range(0, len(pairs), self._max_num_staged) if pairs else ():
            yield pairs[start : start + self._max_num_staged]


def _rotate(stagings: list[_Staging]) -> _Staging:
    """The one that was used the longest ago."""
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
