"""Tokens of prompts in a step beside running streams, by its predicted time."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Final

from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_times import StepTimes

LEAST_NUM_TOKENS: Final = 8
"""Prompt tokens that a step may always have: fewer cost nearly as much, since products take rows by the tile."""

LONG_NUM_STEPS: Final = 16
"""A prompt that needs more such steps leaves half of each to prompts behind it, which may be short ones."""

DEFAULT_NUM_STEPS: Final = 3.0
"""The target in steps of decodes, where none was given and where the time of a step is not known yet; and so many steps
are enough for any, unless what each step costs is more than a sixth of its prompts."""

COSTLY_NUM_BASES: Final = 6.0
"""Prompts of a step that take so many times what each step costs lose a seventh by being cut there. All work loses up
to 3 % by it."""


class PromptPace:
    """Cuts chunks of prompts by the predicted time of the step, once any request has its first token.

    Attributes:
        is_full: Whether the step has no time left for prompts.
        has_prompts: Whether the last step may have had some.
    """

    def __init__(self, config: SchedulerConfig, times: StepTimes) -> None:
        self.is_full = self.has_prompts = False
        self._times = times
        self._target_s = config.max_itl_ms / 1000.0
        self._num_steps = config.max_itl_steps or DEFAULT_NUM_STEPS
        self._max_num_stream_tokens = 1 + config.max_num_drafts
        self._has_several = False
        self._left_s: float | None = None

    def begin_step(self, running: Iterable[Request], has_waiting: bool) -> None:
        """Begins a step; O(running) where it may have prompts."""
        may_have_prompts, self.has_prompts = has_waiting or self.has_prompts, False
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
            base_s, _, decode_s, pair_s = self._times.fitted()
            streams_s = base_s + decode_s * num_decodes + pair_s * num_pairs
            if self._target_s and self._times.is_fitted:
                self._left_s = max(self._target_s - streams_s, 0.0)
            else:
                self._left_s = self._worth_s(streams_s, base_s)

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """The number of the request's next tokens that the step has time for; the first prompt has some always.

        What is left of a prompt is cut into equal parts, so that the last one is no remainder of a few tokens. Long
        prompts share a step with others, whose first tokens would come only after them.
        """
        self.has_prompts = True
        if self._left_s is None or self._is_stream(request, start):
            return num_tokens
        if self.is_full:
            return 0
        _, token_s, _, pair_s = self._times.weights
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
        return max(int(num_tokens_within(left_s, own_s, pair_s)), LEAST_NUM_TOKENS)


def num_tokens_within(left_s: float, own_s: float, pair_s: float) -> float:
    """Tokens that fit into a time: the root of own_s n + pair_s n^2 / 2 = left_s."""
    return 2 * left_s / (own_s + sqrt(own_s * own_s + 2 * pair_s * left_s))


def make_prompt_pace(config: SchedulerConfig, times: StepTimes) -> PromptPace | None:
    """As `PromptPace`; None where there is no target."""
    return PromptPace(config, times) if config.max_itl_ms or config.max_itl_steps else None
