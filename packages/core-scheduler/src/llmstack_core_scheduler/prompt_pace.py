"""Tokens of prompts in a step beside running streams, by its predicted time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any, Final

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.request import Request
from llmstack_types import ScheduledRequest, SchedulerOutput
from llmstack_types.least_squares import RunningFit, fit_non_negative

LEAST_NUM_TOKENS: Final = 8
"""Prompt tokens that a step may always have: fewer cost nearly as much, since products take rows by the tile."""

LONG_NUM_STEPS: Final = 16
"""A prompt that needs more such steps leaves half of each to prompts behind it, which may be short ones."""

DEFAULT_NUM_STEPS: Final = 3.0
"""The target in steps of decodes, where none was given and where the time of a step is not known yet; and so many steps
are enough for any, unless what each step costs is more than a tenth of its prompts."""

COSTLY_NUM_BASES: Final = 10.0
"""Prompts of a step that take so many times what each step costs lose a tenth by being cut there."""

# Base, prompt token, decode, and pair of a token with one that it attends to, in units of the first. They count until
# enough was measured; the second and the third are those of GPT-2's shape on a CPU.
_PRIOR: Final = (1.0, 0.125, 0.125, 1e-5)
_MIN_NUM_STEPS: Final = 16
_MIN_NUM_WITH_PROMPTS: Final = 3
_FIT_INTERVAL: Final = 16
# After 200 measurements of its kind, one counts a third: the machine may have other work by then.
_KEPT: Final = 0.995
# Of steps of decodes, nearly all equal, a part is enough.
_DECODE_INTERVAL: Final = 4


class PromptPace:
    """Cuts chunks of prompts by the predicted time of the step, once any request has its first token.

    The time is linear in the step's prompt tokens, its decodes, and the pairs of tokens that attend to each other. The
    weights are fitted to the steps so far, by the times that the scheduler is given: equal calls give equal chunks.
    Steps with and without prompts fade apart, so that a load of prompts does not make the time of a decode forgotten.

    Attributes:
        is_full: Whether the step has no time left for prompts.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.is_full = False
        self._target_s = config.max_itl_ms / 1000.0
        self._num_steps = config.max_itl_steps or DEFAULT_NUM_STEPS
        self._max_num_stream_tokens = 1 + config.max_num_drafts
        self._weights: Sequence[float] = _PRIOR
        self._fits = (RunningFit(4, _KEPT), RunningFit(4, _KEPT))  # of steps without prompts, and of those with
        self._num_unfitted = 0
        self._is_fitted = False
        self._last_end_s = 0.0
        self._has_prompts = self._has_several = False
        self._left_s: float | None = None

    def begin_step(self, running: Iterable[Request], has_waiting: bool) -> None:
        """Begins a step; O(running) where it may have prompts."""
        may_have_prompts, self._has_prompts = has_waiting or self._has_prompts, False
        self._left_s, self.is_full = None, False
        if not may_have_prompts:
            return
        num_decodes = num_pairs = num_others = 0
        for request in running:
            if self._is_stream(request, request.num_computed_tokens):
                num_decodes += 1
                num_pairs += request.num_computed_tokens
            else:
                num_others += 1
        self._has_several = num_others + has_waiting > 1
        if num_decodes:
            base_s, _, decode_s, pair_s = self._fitted()
            streams_s = base_s + decode_s * num_decodes + pair_s * num_pairs
            if self._target_s and self._is_fitted:
                self._left_s = max(self._target_s - streams_s, 0.0)
            else:
                self._left_s = self._worth_s(streams_s, base_s)

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of the request's next `num_tokens` tokens the step has time for; the first prompt has some always.

        What is left of a prompt is cut into equal parts, so that the last one is no remainder of a few tokens. Long
        prompts share a step with others, whose first tokens would come only after them.
        """
        self._has_prompts = True
        if self._left_s is None or self._is_stream(request, start):
            return num_tokens
        if self.is_full:
            return 0
        _, token_s, _, pair_s = self._weights
        own_s = token_s + pair_s * start
        num_left, room = request.num_tokens - start, self._room(self._left_s, own_s, pair_s)
        if self._has_several and num_left > LONG_NUM_STEPS * room:
            room = self._room(self._left_s / 2, own_s, pair_s)
        if num_tokens > room:
            num_parts = -(-num_left // room)
            num_tokens = min(-(-num_left // num_parts), num_tokens)
        self._left_s -= num_tokens * (own_s + pair_s * num_tokens / 2)
        self.is_full = self._left_s < LEAST_NUM_TOKENS * token_s
        return num_tokens

    def observe(self, scheduled: SchedulerOutput, start_s: float, end_s: float) -> None:
        """Learns from a step; one that was scheduled ahead is counted from the end of the one before."""
        seconds, self._last_end_s = end_s - max(start_s, self._last_end_s), end_s
        rows = scheduled.scheduled_requests
        has_prompts = scheduled.total_num_scheduled_tokens != len(rows)
        if not (has_prompts or scheduled.step % _DECODE_INTERVAL == 0) or seconds <= 0.0 or not rows:
            return
        if scheduled.encoder_work or scheduled.swap_ins or scheduled.swap_outs or scheduled.block_copies:
            return
        num_prompt_tokens, num_decodes, num_pairs = _work(rows)
        weight = 1.0 / seconds
        row = (weight, num_prompt_tokens * weight, num_decodes * weight, num_pairs * weight)
        self._fits[num_prompt_tokens > 0].observe(row)
        self._num_unfitted += 1

    def state(self) -> list[Any]:
        """What the next cuts depend on, as plain data."""
        fits = [([line.copy() for line in fit.gram], fit.sums.copy(), fit.num_measured) for fit in self._fits]
        return [
            list(self._weights), self._num_unfitted, self._is_fitted, self._last_end_s, self._has_prompts, fits,
        ]  # fmt: skip

    def restore(self, state: Sequence[Any]) -> None:
        """Takes the state of another one with the same configuration."""
        weights, self._num_unfitted, self._is_fitted, self._last_end_s, self._has_prompts, fits = state
        self._weights = list(weights)
        for fit, (gram, sums, num_measured) in zip(self._fits, fits, strict=True):
            fit.gram, fit.sums, fit.num_measured = [list(line) for line in gram], list(sums), num_measured

    def _worth_s(self, streams_s: float, base_s: float) -> float:
        """Time of prompts within the limit: more would delay the streams, and compute little faster."""
        enough_s = max((DEFAULT_NUM_STEPS - 1) * streams_s, COSTLY_NUM_BASES * base_s)
        return min((self._num_steps - 1) * streams_s, enough_s)

    def _is_stream(self, request: Request, start: int) -> bool:
        """Whether it has its first token; after a step with drafts, the right ones may have to be computed again."""
        num_left = request.num_tokens - start
        return start >= request.num_prompt_tokens and num_left <= self._max_num_stream_tokens

    @staticmethod
    def _room(left_s: float, own_s: float, pair_s: float) -> int:
        """Tokens that fit into a time: the root of own_s n + pair_s n^2 / 2 = left_s."""
        return max(int(2 * left_s / (own_s + sqrt(own_s * own_s + 2 * pair_s * left_s))), LEAST_NUM_TOKENS)

    def _fitted(self) -> Sequence[float]:
        without, with_prompts = self._fits
        num_steps = without.num_measured + with_prompts.num_measured
        is_known = num_steps >= _MIN_NUM_STEPS and with_prompts.num_measured >= _MIN_NUM_WITH_PROMPTS
        if is_known and (not self._is_fitted or self._num_unfitted >= _FIT_INTERVAL):
            self._num_unfitted = 0
            gram = [
                [a + b for a, b in zip(*lines, strict=True)]
                for lines in zip(without.gram, with_prompts.gram, strict=True)
            ]
            weights = fit_non_negative(gram, [a + b for a, b in zip(without.sums, with_prompts.sums, strict=True)])
            base_s, token_s, decode_s, _ = weights
            if token_s and (base_s or decode_s):  # else the steps were too alike, and the weights before stay
                self._weights, self._is_fitted = weights, True
        return self._weights


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


def make_prompt_pace(config: SchedulerConfig) -> PromptPace | None:
    """As `PromptPace`; None where there is no target."""
    return PromptPace(config) if config.max_itl_ms or config.max_itl_steps else None
