"""Token masks of a step's constrained rows, also for parts of the step."""

from __future__ import annotations

from collections.abc import Callable

from llmstack_model_runner.steps.computation import MakeTokenMasks
from llmstack_model_runner.steps.input_batch import StepRows
from llmstack_model_runner.steps.output import PendingStep
from llmstack_types import TokenMasks


class PartMasks:
    """Fetches a step's masks once, when they are first needed, even if rows are computed several times."""

    def __init__(self, step: StepRows, token_masks: MakeTokenMasks) -> None:
        """`token_masks` is the argument of `execute_model`."""
        self._step = step
        self._token_masks = token_masks
        self._masks: TokenMasks | None = None

    def masked(self, compute: Callable[[StepRows, MakeTokenMasks], PendingStep]) -> Callable[[StepRows], PendingStep]:
        """`compute` for some rows of the step, with the masks of these."""
        return lambda part: compute(part, lambda: self._of(part))

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
            self._masks = self._token_masks()
        return self._masks
