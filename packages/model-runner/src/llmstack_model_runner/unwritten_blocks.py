"""Blocks whose keys and values were to be written by a row that has failed, so that nobody reads them."""

from __future__ import annotations

from collections.abc import Iterable

from llmstack_model_runner.input_batch import InputBatch, StepRows
from llmstack_types import SchedulerOutput

_MAX_AGE = 4
"""Steps for which they are followed. A scheduler that is a step ahead learns of a failure before the second step after
it: then the request is gone, its prefix is forgotten, and whoever gets its blocks writes them first."""

_Ages = dict[int, int]  # block to the number of the step that failed


class UnwrittenBlocks:
    """Follows them over copies and swaps for a few steps, or until another request writes them from their beginning.

    A step may be scheduled before the failure in the last one is known: its rows may share what never came to be.
    False while there are none, as nearly always.
    """

    def __init__(self) -> None:
        self._step = 0
        self._device: _Ages = {}
        self._host: _Ages = {}

    def __bool__(self) -> bool:
        return bool(self._device or self._host)

    def follow(self, scheduled: SchedulerOutput) -> None:
        """Takes over a step's copies, in their order."""
        self._step += 1
        if self:
            self._device, self._host = self._young(self._device), self._young(self._host)
            _follow(scheduled.swap_outs, self._device, self._host)
            _follow(scheduled.swap_ins, self._host, self._device)
            _follow(scheduled.block_copies, self._device, self._device)

    def add(self, batch: InputBatch, step: StepRows) -> None:
        """The rows of the step have written nothing."""
        for index in range(len(step.rows)):
            self._device.update(dict.fromkeys(_written(batch, step, index, is_whole=False), self._step))

    def readers(self, batch: InputBatch, step: StepRows) -> list[int]:
        """Indices of the rows that would read such a block; the others are about to write theirs."""
        found: list[int] = []
        for index, row in enumerate(step.rows.tolist() if self._device else ()):
            num_read_blocks = -(-int(step.num_computed_tokens[index]) // batch.block_size)
            if self._device.keys().isdisjoint(batch.block_tables[row, :num_read_blocks].tolist()):
                for block_id in _written(batch, step, index, is_whole=True):
                    self._device.pop(block_id, None)
            else:
                found.append(index)
                self._device.update(dict.fromkeys(_written(batch, step, index, is_whole=False), self._step))
        return found

    def _young(self, ages: _Ages) -> _Ages:
        return {block_id: step for block_id, step in ages.items() if self._step - step <= _MAX_AGE}


def _follow(pairs: Iterable[tuple[int, int]], sources: _Ages, destinations: _Ages) -> None:
    for source, destination in pairs:
        if source in sources:
            destinations[destination] = sources[source]
        else:
            destinations.pop(destination, None)


def _written(batch: InputBatch, step: StepRows, index: int, *, is_whole: bool) -> list[int]:
    """The blocks that a row writes in this step; with `is_whole` those alone that it begins."""
    start = int(step.num_computed_tokens[index])
    first = -(-start // batch.block_size) if is_whole else start // batch.block_size
    end = -(-(start + int(step.num_scheduled_tokens[index])) // batch.block_size)
    block_ids: list[int] = batch.block_tables[step.rows[index], first:end].tolist()
    return block_ids
