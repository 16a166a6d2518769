"""Hidden states of the last positions of rows, until their next tokens are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows


class LastStates:
    """Hidden states that a step leaves for the drafts of the next one.

    Attributes:
        states: Of the places of each row.
        starts: The first of these places.
        counts: How many there are.
        generations: As in the batch, of the request that all this is of.
    """

    def __init__(
        self, batch: InputBatch, max_num_drafts: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`size`: Numbers of a state."""
        num_rows = len(batch.num_tokens)
        self._batch, self._device = batch, device
        self.states = torch.zeros((num_rows, 1 + max_num_drafts, size), dtype=dtype, device=device)
        self.starts, self.counts = np.zeros((2, num_rows), dtype=np.int64)
        self.generations = np.full(num_rows, -1, dtype=np.int64)

    def begin(self, rows: IntArray) -> IntArray:
        """Forgets rows that belong to new requests, and returns them."""
        new: IntArray = rows[self.generations[rows] != self._batch.generations[rows]]
        self.counts[new], self.generations[rows] = 0, self._batch.generations[rows]
        return new

    def are_of(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Whether the states of each row are of its request: [num_rows]."""
        found: npt.NDArray[np.bool_] = self.generations[rows] == self._batch.generations[rows]
        return found

    def take(self, step: StepRows, hidden: torch.Tensor) -> None:
        """Keeps the states of the places whose next tokens the step samples: hidden is [num_tokens, size]."""
        last = np.flatnonzero(step.num_left == 0)
        if not len(last):
            return
        rows, counts = step.rows[last], step.num_drafts[last] + 1
        ends = np.cumsum(step.num_scheduled_tokens)[last]
        target = (
            self.to_device(np.repeat(rows, counts)), self.to_device(ragged_aranges(np.zeros_like(counts), counts)),
        )  # fmt: skip
        self.states.index_put_(target, hidden[self.to_device(ragged_aranges(ends - counts, counts))])
        self.starts[rows] = (step.num_computed_tokens + step.num_scheduled_tokens)[last] - counts
        self.counts[rows] = counts

    def at(self, rows: IntArray, places: IntArray) -> torch.Tensor:
        """The states of these places, counted from the first: [len(rows), size]."""
        return self.states[self.to_device(rows), self.to_device(places)]

    def to_device(self, array: IntArray) -> torch.Tensor:
        """An index where the states are."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
