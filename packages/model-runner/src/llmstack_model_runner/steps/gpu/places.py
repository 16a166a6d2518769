"""Places of a step that are sampled: last known tokens, and drafts behind them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows

Drafts = npt.NDArray[np.int32]
"""`Places.drafts` on the host: [num_places, 2]."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places on the device, parallel to the logits.

    Attributes:
        rows: Row of the batch of each place, on the host: [num_places].
        device_rows: The same on the device: int32 [num_places].
        drafts: How many places behind the last known token of its row each stands, and its draft; see
            `llmstack_kernels.decode_inputs`. None where every row has one place. int32 [num_places, 2]
    """

    rows: IntArray
    device_rows: torch.Tensor
    drafts: torch.Tensor | None = None

    def select(self, places: IntArray, index: torch.Tensor) -> Places:
        """Some of the places; `index` are the same numbers on the device."""
        drafts = None if self.drafts is None else self.drafts.index_select(0, index)
        return Places(self.rows[places], self.device_rows.index_select(0, index), drafts)


def lay_out_places(batch: InputBatch, step: StepRows, sampling_indices: IntArray) -> tuple[IntArray, Drafts | None]:
    """Rows of the places, and what `Places.drafts` says of them; None if no row of the step has drafts."""
    rows = step.rows[sampling_indices]
    if not step.has_drafts:
        return rows, None
    num_places = step.num_drafts[sampling_indices] + 1
    ends = step.num_computed_tokens[sampling_indices] + step.num_scheduled_tokens[sampling_indices]
    drafts = np.empty((int(num_places.sum()), 2), dtype=np.int32)
    rows = np.repeat(rows, num_places)
    drafts[:, 0] = ragged_aranges(np.zeros_like(num_places), num_places)
    drafts[:, 1] = batch.token_ids[rows, ragged_aranges(ends - num_places, num_places)]
    return rows, drafts
