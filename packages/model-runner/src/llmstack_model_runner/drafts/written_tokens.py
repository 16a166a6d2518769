"""Tokens whose keys and values a draft model has written, by row and by block."""

from __future__ import annotations

import numpy as np

from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import SchedulerOutput


class WrittenTokens:
    """The tokens of each row that a draft model has computed.

    A draft model has a storage of its own under the block ids of the served one, and computes tokens when it needs
    them. So it has not written every block of a request in a row. A block that was filled once stays so until
    it gets other tokens. What is wrong here costs accepted drafts and changes no text.
    """

    def __init__(self, batch: InputBatch, group: int, num_blocks: int, max_num_drafts: int) -> None:
        """`group`: The group of layers whose block tables keep the whole context."""
        num_rows = len(batch.num_tokens)
        self._batch, self._group = batch, group
        self._is_filled = np.zeros(num_blocks, dtype=np.bool_)
        self._num_written = np.zeros(num_rows, dtype=np.int64)
        self._generations = np.full(num_rows, -1, dtype=np.int64)
        # The drafts of the last step, whose keys and values count if they were right.
        self._guesses = np.zeros((num_rows, max_num_drafts), dtype=np.int64)
        self._num_guesses = np.zeros(num_rows, dtype=np.int64)

    def follow(self, scheduled: SchedulerOutput, step: StepRows) -> None:
        """Forgets blocks that a step gives other tokens. The batch has the step's rows already."""
        for pairs in (scheduled.swap_ins, scheduled.block_copies):
            self.forget([block_id for _, block_id in pairs])
        batch, num_groups = self._batch, len(self._batch.block_tables)
        for index, row in enumerate(scheduled.scheduled_requests):
            if not row.new_block_ids:
                continue
            own = int(step.rows[index])
            num_found = max(row.num_computed_tokens, int(batch.num_held_tokens[own]))
            end = int(batch.num_row_blocks[own])
            first = max(end - len(row.new_block_ids) // num_groups, -(-num_found // batch.block_size))
            self._is_filled[batch.block_tables[self._group, own, first:end]] = False

    def forget(self, block_ids: list[int]) -> None:
        """Forgets blocks that were written from elsewhere."""
        if block_ids:
            self._is_filled[block_ids] = False

    def of_rows(self, rows: IntArray) -> IntArray:
        """The leading tokens of each row that are written, at least one less than are known."""
        for row in rows[self._generations[rows] != self._batch.generations[rows]].tolist():
            self._begin(row)
        num_known = self._batch.num_tokens[rows]
        num_written = np.minimum(self._num_written[rows], num_known - 1)
        places = np.arange(self._guesses.shape[1])
        columns = np.minimum(num_written[:, None] + places, self._batch.token_ids.shape[1] - 1)
        is_right = self._batch.token_ids[rows[:, None], columns] == self._guesses[rows]
        is_right &= places < np.minimum(self._num_guesses[rows], num_known - 1 - num_written)[:, None]
        num_right = np.cumprod(is_right, axis=1).sum(axis=1)
        self.note(rows, num_written + num_right)
        return self._num_written[rows]

    def note(self, rows: IntArray, num_written: IntArray) -> None:
        """Notes how many leading tokens of each of these distinct rows are written."""
        size, tables = self._batch.block_size, self._batch.block_tables[self._group]
        firsts, ends = self._num_written[rows] // size, num_written // size
        for row, first, end in zip(rows.tolist(), firsts.tolist(), ends.tolist(), strict=True):
            if end > first:
                self._is_filled[tables[row, first:end]] = True
        self._num_written[rows] = num_written
        self._num_guesses[rows] = 0

    def note_guesses(self, rows: IntArray, drafts: IntArray, num_written: IntArray) -> None:
        """The first `num_written` drafts of each row are written behind its known tokens; drafts: [rows, places]."""
        self._guesses[rows, : drafts.shape[1]] = drafts
        self._num_guesses[rows] = num_written

    def _begin(self, row: int) -> None:
        """Looks a new row's blocks up."""
        batch = self._batch
        self._generations[row] = batch.generations[row]
        num_blocks = (int(batch.num_tokens[row]) - 1) // batch.block_size
        is_filled = self._is_filled[batch.block_tables[self._group, row, :num_blocks]]
        num_filled = num_blocks if is_filled.all() else int(is_filled.argmin())
        self._num_written[row], self._num_guesses[row] = num_filled * batch.block_size, 0
