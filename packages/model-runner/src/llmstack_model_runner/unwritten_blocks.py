"""Blocks whose keys and values were to be written by a row that has failed, so that nobody reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from llmstack_model_runner.input_batch import InputBatch, StepRows
from llmstack_types import SchedulerOutput


class UnwrittenBlocks:
    """Follows them over copies and swaps, until another request writes them from their beginning.

    A step may be scheduled before the failure in the last one is known: its rows may share what never came to be.
    False while there are none, as nearly always.
    """

    def __init__(self) -> None:
        self._device: set[int] = set()
        self._host: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._device or self._host)

    def follow(self, scheduled: SchedulerOutput) -> None:
        """Takes over a step's copies, in their order."""
        if self:
            _follow(scheduled.swap_outs, self._device, self._host)
            _follow(scheduled.swap_ins, self._host, self._device)
            _follow(scheduled.block_copies, self._device, self._device)

    def add(self, batch: InputBatch, step: StepRows) -> None:
        """The rows of the step have written nothing."""
        for index in range(len(step.rows)):
            self._device.update(_written(batch, step, index, is_whole=False))

    def readers(self, batch: InputBatch, step: StepRows) -> list[int]:
        """Indices of the rows that would read such a block; the others are about to write theirs."""
        found: list[int] = []
        if not self._device:
            return found
        for index, row in enumerate(step.rows.tolist()):
            num_read_blocks = -(-int(step.num_computed_tokens[index]) // batch.block_size)
            if self._device.isdisjoint(batch.block_tables[row, :num_read_blocks].tolist()):
                self._device.difference_update(_written(batch, step, index, is_whole=True))
            else:
                found.append(index)
                self._device.update(_written(batch, step, index, is_whole=False))  # for those that follow
        return found


def _follow(pairs: Iterable[tuple[int, int]], sources: set[int], destinations: set[int]) -> None:
    for source, destination in pairs:
        if source in sources:
            destinations.add(destination)
        else:
            destinations.discard(destination)


def _written(batch: InputBatch, step: StepRows, index: int, *, is_whole: bool) -> Iterator[int]:
    """The blocks that a row writes in this step; with `is_whole` those alone that it begins."""
    start = int(step.num_computed_tokens[index])
    first = -(-start // batch.block_size) if is_whole else start // batch.block_size
    end = -(-(start + int(step.num_scheduled_tokens[index])) // batch.block_size)
    block_ids: Iterator[int] = iter(np.asarray(batch.block_tables[step.rows[index], first:end]).tolist())
    return block_ids
