"""The rows of the input batch as the device knows them: last token, position, block ids; brought up by differences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.decode_inputs import FIRST_BLOCK, LAST_TOKEN, POSITION, advance_rows, update_rows
from llmstack_model_runner.device.runtime import DeviceRuntime
from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.input_batch import InputBatch
from llmstack_model_runner.ragged import IntArray, ragged_aranges

_NOWHERE = -1


class DeviceRows:
    """The same row numbers as in the batch, and a scratch row behind them for what merely fills a step up.

    The host knows what the device has of each row, its tokens aside, without ever asking: the device changes a row only
    in steps that the host has started.

    Attributes:
        state: int32 [max_num_rows + 1, FIRST_BLOCK + max_blocks_per_row]
        scratch_row: The last row; its block belongs to nobody.
    """

    def __init__(self, batch: InputBatch, scratch_block: int, runtime: DeviceRuntime, staging: Staging) -> None:
        max_num_rows, max_blocks = batch.block_tables.shape
        self.state = torch.zeros((max_num_rows + 1, FIRST_BLOCK + max_blocks), dtype=torch.int32, device=runtime.device)
        self.state[-1, FIRST_BLOCK] = scratch_block
        self.scratch_row = max_num_rows
        self._batch = batch
        self._staging = staging
        self._generations = np.full(max_num_rows, _NOWHERE, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_rows, dtype=np.int64)
        self._positions = np.full(max_num_rows, _NOWHERE, dtype=np.int64)

    def bring_up(self, rows: IntArray, sampling_rows: IntArray) -> None:
        """Makes the device know the blocks of `rows`, and of `sampling_rows` the last token and its position.

        In a steady decode there is nothing to send, but a block id every `block_size` steps.
        """
        self._forget_former_requests(rows)
        updates = [*self._new_blocks(rows), *self._new_places(sampling_rows)]
        if updates:
            (sent,) = self._staging.send([np.concatenate(updates)])
            update_rows(self.state, sent)

    def advance(
        self, rows: IntArray, device_rows: torch.Tensor, token_ids: torch.Tensor, is_good: torch.Tensor
    ) -> torch.Tensor:
        """Makes sampled tokens the last ones of their rows; returns the tokens, -1 for those that are not good: int32.

        Args:
            rows: Brought up before. [num_rows]
            device_rows: The same on the device. int32 [num_rows]
            token_ids: [num_rows]
            is_good: [num_rows]
        """
        results = torch.empty_like(device_rows)
        advance_rows(self.state, device_rows, token_ids, is_good, results)
        self.note_advance(rows)
        return results

    def note_advance(self, rows: IntArray) -> None:
        """The device has been told to advance these rows."""
        self._positions[rows] += 1

    def forget(self, rows: IntArray) -> None:
        """Nothing is certain of what the device has of these rows."""
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
        yield _updates(rows_of_columns, FIRST_BLOCK + columns, self._batch.block_tables[rows_of_columns, columns])

    def _new_places(self, rows: IntArray) -> Iterator[npt.NDArray[np.int32]]:
        """Of rows whose last token the host knows and the device has not computed itself: of new ones, mostly."""
        positions = self._batch.num_tokens[rows] - 1
        is_other = self._positions[rows] != positions
        if not is_other.any():
            return
        rows, positions = rows[is_other], positions[is_other]
        self._positions[rows] = positions
        yield _updates(rows, LAST_TOKEN, self._batch.token_ids[rows, positions])
        yield _updates(rows, POSITION, positions)


def _updates(rows: IntArray, columns: IntArray | int, values: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Rows, columns and values side by side: [num_updates, 3]."""
    updates = np.empty((len(rows), 3), dtype=np.int32)
    updates[:, 0], updates[:, 1], updates[:, 2] = rows, columns, values
    return updates
