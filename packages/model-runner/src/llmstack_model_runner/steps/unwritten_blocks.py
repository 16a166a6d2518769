"""Unwritten blocks of failed rows, which later rows must not read."""

from __future__ import annotations

from collections.abc import Iterable

from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import SchedulerOutput

_MAX_AGE = 4
"""Number of steps for which blocks are tracked. A scheduler that is one step ahead learns of a failure before the
second step after it. Then the request is removed, its prefix is no longer cached, and the next owner writes its blocks
first."""

_Ages = dict[int, int]  # block to the number of the step that failed


class UnwrittenBlocks:
    """Tracks unwritten blocks over copies and swaps for a few steps, or until a request writes them from their start.

    A step may be scheduled before the failure of the last one is known, so its rows may share blocks that were never
    written.

    Attributes:
        on_device: Unwritten blocks of the device; nearly always there are none.
        states: Unwritten state blocks.
    """

    def __init__(self) -> None:
        self._step = 0
        self.on_device: _Ages = {}
        self._host: _Ages = {}
        self.states: _Ages = {}

    @property
    def has_any(self) -> bool:
        """Whether a row of the device may read what was not written."""
        return bool(self.on_device or self.states)

    def follow(self, scheduled: SchedulerOutput) -> None:
        """Applies a step's copies, in their order."""
        self._step += 1
        if self.states:
            self.states = self._young(self.states)
        if self.on_device or self._host:
            self.on_device, self._host = self._young(self.on_device), self._young(self._host)
            _follow(scheduled.swap_outs, self.on_device, self._host)
            _follow(scheduled.swap_ins, self._host, self.on_device)
            _follow(scheduled.block_copies, self.on_device, self.on_device)

    def add(self, batch: InputBatch, step: StepRows) -> None:
        """Adds the blocks of rows that have failed."""
        for index in range(len(step.rows)):
            self._add_row(batch, step, index)

    def note_written(self, block_ids: Iterable[int]) -> None:
        """Removes blocks that were written from elsewhere."""
        for block_id in block_ids:
            self.on_device.pop(block_id, None)

    def readers(self, batch: InputBatch, step: StepRows) -> list[int]:
        """Indices of the rows that would read an unwritten block; blocks that the other rows write are removed."""
        found: list[int] = []
        for index in range(len(step.rows) if self.has_any else 0):
            source, target = (-1, -1) if step.states is None else step.states[index].tolist()
            if source not in self.states and self.on_device.keys().isdisjoint(_read(batch, step, index)):
                for block_id in _written(batch, step, index, is_whole=True):
                    self.on_device.pop(block_id, None)
                self.states.pop(target, None)
            else:
                found.append(index)
                self._add_row(batch, step, index)
        return found

    def _add_row(self, batch: InputBatch, step: StepRows, index: int) -> None:
        self.on_device.update(dict.fromkeys(_written(batch, step, index, is_whole=False), self._step))
        if step.states is not None:
            self.states[int(step.states[index, 1])] = self._step

    def _young(self, ages: _Ages) -> _Ages:
        return {block_id: step for block_id, step in ages.items() if self._step - step <= _MAX_AGE}


def _follow(pairs: Iterable[tuple[int, int]], sources: _Ages, destinations: _Ages) -> None:
    for source, destination in pairs:
        if source in sources:
            destinations[destination] = sources[source]
        else:
            destinations.pop(destination, None)


def _read(batch: InputBatch, step: StepRows, index: int) -> list[int]:
    """The blocks that a row reads and that were written before, without blocks that a sliding window has passed."""
    num_tokens = int(step.num_computed_tokens[index])
    end = -(-max(num_tokens, int(batch.num_held_tokens[step.rows[index]])) // batch.block_size)
    block_ids: list[int] = []
    for window, tables in zip(batch.group_windows, batch.block_tables, strict=True):
        first = 0 if window is None else max(num_tokens - window + 1, 0) // batch.block_size
        block_ids += tables[step.rows[index], first:end].tolist()
    return block_ids


def _written(batch: InputBatch, step: StepRows, index: int, *, is_whole: bool) -> list[int]:
    """The blocks that a row writes in this step; with `is_whole` only those written from their start."""
    start = max(int(step.num_computed_tokens[index]), int(batch.num_held_tokens[step.rows[index]]))
    first = -(-start // batch.block_size) if is_whole else start // batch.block_size
    end = -(-int(step.num_computed_tokens[index] + step.num_scheduled_tokens[index]) // batch.block_size)
    block_ids: list[int] = batch.block_tables[:, step.rows[index], first:end].ravel().tolist()
    return block_ids
