"""The time of a step, predicted from the times of those before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from llmstack_types import ScheduledRequest, SchedulerOutput
from llmstack_types.least_squares import RunningFit, fit_non_negative

# Base, prompt token, decode, and pair of a token with one that it attends to, in units of the first. They count until
# enough was measured; the second and the third are those of GPT-2's shape on a CPU.
_PRIOR: Final = (1.0, 0.125, 0.125, 1e-5)
_MIN_NUM_STEPS: Final = 16
_MIN_NUM_WITH_PROMPTS: Final = 3
_FIT_INTERVAL: Final = 16
# After 200 measurements of its kind, one counts a third: the machine may have other work by then.
_KEPT: Final = 0.995
# Of steps of decodes, nearly all equal, a part is enough behind the first ones.
_DECODE_INTERVAL: Final = 4


class StepTimes:
    """Learns what a step costs by itself, and for each of its prompt tokens, decodes, and pairs that attend.

    The weights are fitted to the steps so far, by the times that the scheduler is given: equal calls give equal times.
    Steps with and without prompts fade apart, so that a load of prompts does not make the time of a decode forgotten.

    Attributes:
        weights: Of base, prompt token, decode, and pair of a token with one that it attends to, when last fitted.
        is_fitted: Whether these are seconds; else they are of a usual model, in units of the first.
    """

    def __init__(self) -> None:
        self.weights: Sequence[float] = _PRIOR
        self.is_fitted = False
        self._fits = (RunningFit(4, _KEPT), RunningFit(4, _KEPT))  # of steps without prompts, and of those with
        self._num_unfitted = 0
        self._last_end_s = 0.0

    @property
    def pair_share(self) -> float:
        """The cost of a pair over that of a prompt token by itself; 0 until it is measured."""
        _, token_s, _, pair_s = self.fitted()
        return pair_s / token_s if self.is_fitted else 0.0

    def observe(self, scheduled: SchedulerOutput, start_s: float, end_s: float) -> None:
        """Learns from a step; one that was scheduled ahead is counted from the end of the one before."""
        seconds, self._last_end_s = end_s - max(start_s, self._last_end_s), end_s
        rows = scheduled.scheduled_requests
        has_prompts = scheduled.total_num_scheduled_tokens != len(rows)
        is_new = self._fits[0].num_measured < _MIN_NUM_STEPS
        is_wanted = has_prompts or is_new or scheduled.step % _DECODE_INTERVAL == 0
        if not is_wanted or seconds <= 0.0 or not rows:
            return
        if scheduled.encoder_work or scheduled.swap_ins or scheduled.swap_outs or scheduled.block_copies:
            return
        num_prompt_tokens, num_decodes, num_pairs = _work(rows)
        weight = 1.0 / seconds
        row = (weight, num_prompt_tokens * weight, num_decodes * weight, num_pairs * weight)
        self._fits[num_prompt_tokens > 0].observe(row)
        self._num_unfitted += 1

    def fitted(self) -> Sequence[float]:
        """The weights, fitted again if much was measured since."""
        without, with_prompts = self._fits
        num_steps = without.num_measured + with_prompts.num_measured
        is_known = num_steps >= _MIN_NUM_STEPS and with_prompts.num_measured >= _MIN_NUM_WITH_PROMPTS
        if is_known and (not self.is_fitted or self._num_unfitted >= _FIT_INTERVAL):
            self._num_unfitted = 0
            gram = [
                [a + b for a, b in zip(*lines, strict=True)]
                for lines in zip(without.gram, with_prompts.gram, strict=True)
            ]
            weights = fit_non_negative(gram, [a + b for a, b in zip(without.sums, with_prompts.sums, strict=True)])
            base_s, token_s, decode_s, _ = weights
            if token_s and (base_s or decode_s):  # else the steps were too alike, and the weights before stay
                self.weights, self.is_fitted = weights, True
        return self.weights

    def state(self) -> list[Any]:
        """The data on which the next predictions depend, as plain values."""
        fits = [([line.copy() for line in fit.gram], fit.sums.copy(), fit.num_measured) for fit in self._fits]
        return [list(self.weights), self._num_unfitted, self.is_fitted, self._last_end_s, fits]

    def restore(self, state: Sequence[Any]) -> None:
        """The inverse of `state`."""
        weights, self._num_unfitted, self.is_fitted, self._last_end_s, fits = state
        self.weights = list(weights)
        for fit, (gram, sums, num_measured) in zip(self._fits, fits, strict=True):
            fit.gram, fit.sums, fit.num_measured = [list(line) for line in gram], list(sums), num_measured


def _work(rows: Iterable[ScheduledRequest]) -> tuple[int, int, int]:
    """Prompt tokens, decodes with their drafts, and pairs of tokens that attend to each other."""
    num_prompt_tokens = num_decodes = num_pairs = 0
    for row in rows:
        start, num_tokens = row[1], row[2]  # a named tuple; by index it is faster
        num_pairs += num_tokens * start + num_tokens * num_tokens // 2
        if num_tokens == 1 or row[4]:
            num_decodes += num_tokens
        else:
            num_prompt_tokens += num_tokens
    return num_prompt_tokens, num_decodes, num_pairs
