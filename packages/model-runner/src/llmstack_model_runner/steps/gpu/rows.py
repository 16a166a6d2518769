"""Rows of the input batch on the device: last token, position and block ids."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.decode_inputs import FIRST_BLOCK, LAST_TOKEN, POSITION, advance_rows, keep_drafts, update_rows
from llmstack_model_runner.device.runtime import DeviceRuntime
from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.steps.input_batch import InputBatch

_NOWHERE = -1
_ON_DEVICE = -2
"""Position of a row that the device has advanced by its right drafts; the host knows them before its next step."""


class DeviceRows:
    """Device state of the batch's rows, by the same row numbers, with a scratch row for padding at the end.

    The host sends differences only. It knows the state of each row, except for its tokens, without reading from the
    device, since the device changes a row only in steps that the host has started.

    Attributes:
        states: For each group of layers a state with its block ids; what they have in common is equal in all of them.
            Each is int32 [max_num_rows + 1, FIRST_BLOCK + max_blocks_per_row].
        scratch_row: The last row, whose block belongs to no request.
    """

    def __init__(self, batch: InputBatch, scratch_block: int, runtime: DeviceRuntime, staging: Staging) -> None:
        num_groups, max_num_rows, max_blocks = batch.block_tables.shape
        self._num_lines = max_num_rows + 1
        shape = (num_groups * self._num_lines, FIRST_BLOCK + max_blocks)
        self._lines = torch.zeros(shape, dtype=torch.int32, device=runtime.device)  # one state after the other
        self.states = self._lines.split(self._num_lines)
        for state in self.states:
            state[-1, FIRST_BLOCK] = scratch_block
        self.scratch_row = max_num_rows
        self._batch = batch
        self._staging = staging
        self._generations = np.full(max_num_rows, _NOWHERE, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_rows, dtype=np.int64)
        self._positions = np.full(max_num_rows, _NOWHERE, dtype=np.int64)

    def update(self, rows: IntArray, sampling_rows: IntArray) -> None:
        """Sends new blocks of `rows`, and last tokens and positions of `sampling_rows` that the device lacks.

        In a steady decode this is one block id per row every `block_size` steps.
        """
        self._forget_former_requests(rows)
        updates = [*self._new_blocks(rows), *self._new_places(sampling_rows)]
        if updates:
            (sent,) = self._staging.send([np.concatenate(updates)])
            update_rows(self._lines, sent)

    def advance(
        self, rows: IntArray, device_rows: torch.Tensor, token_ids: torch.Tensor, is_good: torch.Tensor
    ) -> torch.Tensor:
        """Appends sampled tokens to their rows; returns the tokens, -1 for invalid ones: int32 [num_rows].

        Args:
            rows: Updated before. [num_rows]
            device_rows: The same rows on the device. int32 [num_rows]
            token_ids: [num_rows]
            is_good: [num_rows]
        """
        results = torch.empty_like(device_rows)
        self.advance_states(device_rows, token_ids, is_good, results)
        self.note_advance(rows)
        return results

    def advance_states(
        self, device_rows: torch.Tensor, token_ids: torch.Tensor, is_good: torch.Tensor, results: torch.Tensor
    ) -> None:
        """Advances as `advance`, with room for the results, and for a graph: the host's state stays as it is."""
        for state in self.states:
            advance_rows(state, device_rows, token_ids, is_good, results)

    def keep_drafts(
        self, device_rows: torch.Tensor, drafts: torch.Tensor, token_ids: torch.Tensor, is_good: torch.Tensor
    ) -> torch.Tensor:
        """Advances rows by their right drafts and the token behind them, also in a graph; see the kernel.

        Returns at the last place of a row that is kept how many are, 0 at all others: int64 [num_places].
        """
        num_kept = torch.empty_like(token_ids)
        for state in self.states:
            keep_drafts(state, device_rows, drafts, token_ids, is_good, num_kept)
        return num_kept

    def note_kept(self, rows: IntArray) -> None:
        """Notes that a started step advances these rows, which may have drafts."""
        self._positions[rows] = _ON_DEVICE

    def note_advance(self, rows: IntArray) -> None:
        """Notes that a started graph advances these rows."""
        self._positions[rows] += 1

    def forget(self, rows: IntArray) -> None:
        """Invalidates the device's state of these rows, which the next `update` sends again."""
        self._num_blocks[rows] = 0
        self._positions[rows] = _NOWHERE

    def _forget_former_requests(self, rows: IntArray) -> None:
        is_other = self._generations[rows] != self._batch.generations[rows]
        if is_other.any():
            self._generations[rows] = self._batch.generations[rows]
            self.forget(rows[is_other])

    def _new_blocks(self, rows: IntArray) -> Iterator[npt.NDArray[np.int32]]:
        is_behind = self._num_blocks[rows] != self._batch.num_row_blocks[rows]
        if not is_behind.any():
            return
        rows = rows[is_behind]
        known, now = self._num_blocks[rows], self._batch.num_row_blocks[rows]
        columns = ragged_aranges(known, now - known)
        rows_of_columns = np.repeat(rows, now - known)
        self._num_blocks[rows] = now
        for group, tables in enumerate(self._batch.block_tables):
            lines = group * self._num_lines + rows_of_columns
            yield _updates(lines, FIRST_BLOCK + columns, tables[rows_of_columns, columns])

    def _new_places(self, rows: IntArray) -> Iterator[npt.NDArray[np.int32]]:
        """Updates of last tokens that the host knows and the device has not computed, mostly of new rows."""
        positions = self._batch.num_tokens[rows] - 1
        known = self._positions[rows]
        is_other = (known != positions) & (known != _ON_DEVICE)
        self._positions[rows] = positions
        if not is_other.any():
            return
        rows, positions = rows[is_other], positions[is_other]
        token_ids = self._batch.token_ids[rows, positions]
        for group in range(len(self.states)):
            lines = group * self._num_lines + rows
            yield _updates(lines, LAST_TOKEN, token_ids)
            yield _updates(lines, POSITION, positions)


def _updates(rows: IntArray, columns: IntArray | int, values: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Rows, columns and values of the updates: [num_updates, 3]."""
    updates = np.empty((len(rows), 3), dtype=np.int32)
    updates[:, 0], updates[:, 1], updates[:, 2] = rows, columns, values
    return updates
