"""A cost model that is fitted while steps are measured."""

from __future__ import annotations

from math import isfinite
from typing import Final

from llmstack_engine_core.prediction.cost_model import LinearCostModel, StepWork, fit_non_negative

# Steps that a fit takes at least; so many of them have to compute a prompt.
MIN_NUM_STEPS: Final = 16
MIN_NUM_PREFILLS: Final = 3
# A fit costs about 0.2 ms, so it is made again after as many further steps.
_FIT_INTERVAL: Final = 32
# After a thousand steps a measurement counts a third.
_KEPT: Final = 0.999


class StepCosts:
    """The linear cost model of the steps so far, the last ones first; a new measurement costs 3 microseconds."""

    def __init__(self) -> None:
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._sums = [0.0] * 4
        self._num_steps = self._num_prefills = self._num_unfitted = 0
        self._model: LinearCostModel | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Adds one measured step; one without a duration is ignored."""
        if not (isfinite(seconds) and seconds > 0) or not (work.num_prefill_tokens or work.num_decode_rows):
            return
        weight = 1.0 / seconds
        row = (weight, work[0] * weight, work[1] * weight, work[2] * weight)
        for index, (value, line) in enumerate(zip(row, self._gram, strict=True)):
            self._sums[index] = self._sums[index] * _KEPT + value
            for other, factor in enumerate(row):
                line[other] = line[other] * _KEPT + value * factor
        self._num_steps += 1
        self._num_unfitted += 1
        self._num_prefills += work.num_prefill_tokens > 0

    def model(self) -> LinearCostModel | None:
        """The fitted model; None before enough was measured."""
        if self._num_steps < MIN_NUM_STEPS or self._num_prefills < MIN_NUM_PREFILLS:
            return None
        if self._model is None or self._num_unfitted >= _FIT_INTERVAL:
            self._num_unfitted = 0
            weights = fit_non_negative(self._gram, self._sums)
            self._model = LinearCostModel(*weights) if any(weights) else self._model
        return self._model
