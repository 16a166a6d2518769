"""The masks of a step's constrained rows, for parts of it too."""

from __future__ import annotations

from collections.abc import Callable

from llmstack_model_runner.input_batch import StepRows
from llmstack_types import TokenMasks


class PartMasks:
    """Asks for a step's masks once, when they are first needed, however often its rows are computed."""

    def __init__(self, step: StepRows, token_masks: Callable[[], TokenMasks] | None) -> None:
        """`token_masks` is `execute_model`'s: None where no row is constrained."""
        self._step = step
        self._token_masks = token_masks
        self._masks: TokenMasks | None = None

    def of(self, part: StepRows) -> Callable[[], TokenMasks] | None:
        """What gives the masks of some rows of the step; None where no row of the step is constrained."""
        return None if self._token_masks is None else lambda: self._of(part)

    def _of(self, part: StepRows) -> TokenMasks:
        masks = self._whole()
        if part is self._step:
            return masks
        num_drafts = dict(zip(self._step.request_ids, self._step.num_drafts.tolist(), strict=True))
        num_masks = sum(num_drafts[request_id] + 1 for request_id in masks.request_ids)
        size = len(masks.bits) // max(num_masks, 1)
        request_ids, bits, start = [], bytearray(), 0
        for request_id in masks.request_ids:
            end = start + size * (num_drafts[request_id] + 1)
            if request_id in part.request_ids:
                request_ids.append(request_id)
                bits += masks.bits[start:end]
            start = end
        return TokenMasks(request_ids, bits)

    def _whole(self) -> TokenMasks:
        if self._masks is None:
            if self._token_masks is None:
                raise ValueError("no row of the step is constrained")
            self._masks = self._token_masks()
        return self._masks
