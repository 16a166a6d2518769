"""A cost model that is fitted while steps are measured."""

from __future__ import annotations

from math import isfinite
from typing import Final

from llmstack_engine_client.prediction.cost_model import LinearCostModel, StepWork
from llmstack_types.least_squares import RunningFit, fit_non_negative

# Steps that a fit takes at least; so many of them have to compute a prompt.
MIN_NUM_STEPS: Final = 16
MIN_NUM_PREFILLS: Final = 3
# A fit costs about 0.2 ms, so it is made again after as many further steps.
_FIT_INTERVAL: Final = 32
# After a thousand steps a measurement counts a third.
_KEPT: Final = 0.999
# Steps of so many seconds tell the speed, and at least about five steps.
_SPEED_MEMORY_S: Final = 2.0
_MIN_KEPT: Final = 0.8
_MIN_NUM_SPEEDS: Final = 3.0
# A step that takes longer says more of the machine's other work than of the next steps.
_MAX_SLOWNESS: Final = 10.0


class StepCosts:
    """The linear cost model of the steps so far, the last ones first; a new measurement costs 3 microseconds.

    Attributes:
        last_model: The model of the last fit; None before there was one.
    """

    def __init__(self) -> None:
        self._fit = RunningFit(4, _KEPT)
        self._num_prefills = self._num_unfitted = 0
        self.last_model: LinearCostModel | None = None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Adds one measured step; one without a duration is ignored."""
        if not (isfinite(seconds) and seconds > 0) or not (work.num_prefill_tokens or work.num_decode_rows):
            return
        weight = 1.0 / seconds
        self._fit.observe((weight, work[0] * weight, work[1] * weight, work[2] * weight))
        self._num_unfitted += 1
        self._num_prefills += work.num_prefill_tokens > 0

    def model(self) -> LinearCostModel | None:
        """The fitted model; None before enough was measured."""
        if self._fit.num_measured < MIN_NUM_STEPS or self._num_prefills < MIN_NUM_PREFILLS:
            return None
        if self.last_model is None or self._num_unfitted >= _FIT_INTERVAL:
            self._num_unfitted = 0
            weights = fit_non_negative(self._fit.gram, self._fit.sums)
            self.last_model = LinearCostModel(*weights) if any(weights) else self.last_model
        return self.last_model


class Speed:
    """The duration of the steps of the last seconds, beside the cost model's prediction.

    A machine that others use is faster now and slower then, which a fit over a thousand steps follows too late. And
    a fit of relative errors is near the usual step, which is shorter than the mean. Over many steps the mean decides.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5

    def observe(self, work: StepWork, seconds: float, model: LinearCostModel | None) -> None:
        """Adds a measured step; of a pause in it, a part counts."""
        if model is not None:
            seconds = min(seconds, _MAX_SLOWNESS * model.step_s(work))
        kept = max(1.0 - seconds / _SPEED_MEMORY_S, _MIN_KEPT)
        sums = self._sums
        self._sums = [
            sums[0] * kept + seconds,
            sums[1] * kept + 1.0,
            sums[2] * kept + work[0],
            sums[3] * kept + work[1],
            sums[4] * kept + work[2],
        ]

    def scaled(self, model: LinearCostModel) -> LinearCostModel:
        """The model at the speed of the last seconds."""
        seconds, num_steps, *work = self._sums
        expected_s = model.base_s * num_steps + model.prefill_token_s * work[0]
        expected_s += model.decode_row_s * work[1] + model.context_token_s * work[2]
        if not (expected_s > 0 and num_steps > _MIN_NUM_SPEEDS):
            return model
        ratio = seconds / expected_s
        return LinearCostModel(
            *[
                ratio * weight
                for weight in (model.base_s, model.prefill_token_s, model.decode_row_s, model.context_token_s)
            ]
        )
