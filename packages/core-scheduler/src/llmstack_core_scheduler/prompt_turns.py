"""Turns of prompts in a step: a long one takes what shorter ones leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llmstack_core_scheduler.block_needs import BlockNeeds
from llmstack_core_scheduler.config import SchedulerConfig
from llmstack_core_scheduler.prompt_pace import LEAST_NUM_TOKENS, PromptPace, num_tokens_within
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_core_scheduler.request import Request
from llmstack_core_scheduler.step_plan import StepPlan
from llmstack_core_scheduler.step_times import StepTimes
from llmstack_core_scheduler.waiting_queue import WaitingQueue

LONG_NUM_STEPS: Final = 4
"""A prompt is long if it needs more whole steps than that."""

QUIET_NUM_STEPS: Final = 32
"""After so many steps without a shorter prompt, a long one has whole steps again."""

SHARE_PARTS: Final = 12
LEAST_SHARE: Final = 3
"""Of the tokens of prompts, long ones have at least three twelfths; or an equal part of keys', if that is more."""

_PARTS: Final = (3, 4)
_TIMED_PARTS: Final = (4, 5)
"""The most tokens of a step, of those of a row of shorter prompts: time that is predicted needs less to spare."""

_LEAST_PARTS: Final = 8
"""Beside a shorter prompt, a long one takes no longer than an eighth of what a row of theirs does."""

_MIN_NUM_TOKENS: Final = 2
"""A single token would count as a decode."""

_MAX_SAVED_STEPS: Final = 4


class PromptTurns:
    """Lets long prompts wait for shorter ones in each step, but never for ever.

    A long prompt has a few tokens of a step at first, and what the step has room for once the others have theirs. So it
    takes the whole step where no other prompt waits. Of several the one with the least left takes it.

    A prompt that comes later waits for the step under way. So while shorter ones come, a step has no more tokens of
    prompts than three quarters of what a row of theirs has, and a quarter of a whole step, unless these need more.

    These limits are times, once times are known, and four fifths in place of three quarters: a token far behind in a
    long prompt attends to all before it, and counts as so many at the beginning of a prompt as take its time. Shares
    are tokens: those that are computed.

    What long prompts compute beyond their share of the tokens of prompts is saved, up to some steps. Once nothing is
    saved, the first of them takes all that it can, as without turns. So they always have their share.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        needs: BlockNeeds,
        waiting: WaitingQueue,
        times: StepTimes,
        pace: PromptPace | None,
    ) -> None:
        self._manager, self._needs, self._waiting = manager, needs, waiting
        self._times, self._pace = times, pace
        self._max_num_tokens, self._max_num_step_tokens = config.max_num_row_tokens, config.max_num_batched_tokens
        self._num_quiet_steps, self._mean_num_tokens = QUIET_NUM_STEPS, self._max_num_tokens
        self._num_saved_tokens = 0

    def begin_row(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """The number of the next `num_tokens` tokens that a prompt has before all others."""
        num_found = start if request.num_cached_tokens < 0 else request.num_cached_tokens
        is_long = request.num_tokens - num_found > LONG_NUM_STEPS * self._max_num_tokens
        if not is_long or start >= request.num_prompt_tokens:
            return num_tokens
        pair_share, least = self._pair_share(), LEAST_NUM_TOKENS
        if pair_share:
            num_counted = min(self._mean_num_tokens / _LEAST_PARTS, LEAST_NUM_TOKENS)
            least = max(_within(num_counted, start, pair_share), _MIN_NUM_TOKENS)
            plan.num_first_tokens = self._max_num_tokens
        elif start + num_tokens >= request.num_tokens:
            return num_tokens
        if num_tokens <= least:
            return num_tokens
        num_tokens = min(num_tokens, request.num_tokens - start - 1)  # a row that is extended does not end it
        takes_all = self._num_saved_tokens < 0 and not plan.long_prompts
        plan.long_prompts = [*plan.long_prompts, (request, num_tokens)]
        if takes_all:
            return num_tokens
        plan.num_reserved_tokens += least - 1
        return least

    def fill(self, plan: StepPlan) -> None:
        """Gives long prompts what a step has left, once all other prompts have their rows; O(rows) with prompts."""
        if not plan.has_prompts:
            return
        id_to_wanted = {request.request_id: num_tokens for request, num_tokens in plan.long_prompts}
        others: list[int] = []
        places: list[int] = []
        for place, (row, request) in enumerate(zip(plan.rows, plan.requests, strict=True)):
            if row.request_id in id_to_wanted:
                places.append(place)
            elif row.num_computed_tokens < request.num_prompt_tokens:
                others.append(row.num_scheduled_tokens)
        if others or places:
            self._observe(others)
        if places:
            self._fill(places, id_to_wanted, sum(others), plan)

    def _fill(self, places: Sequence[int], id_to_wanted: Mapping[str, int], num_others: int, plan: StepPlan) -> None:
        """Extends the long rows at these places, beside so many tokens of other prompts."""
        pair_share, most = self._pair_share(), self._most_tokens()
        rows = [plan.rows[place] for place in places]
        num_own = sum(row.num_scheduled_tokens for row in rows)
        num_counted = sum(_counted(row.num_scheduled_tokens, row.num_computed_tokens, pair_share) for row in rows)
        num_counted += num_others
        for place in sorted(places, key=lambda place: (plan.requests[place].num_left_tokens, place)):
            row = plan.rows[place]
            start = row.num_computed_tokens + row.num_scheduled_tokens
            num_wanted = id_to_wanted[row.request_id] - row.num_scheduled_tokens
            room = _within(max(most - num_counted, 0), start, pair_share)
            num_added = self._extend(place, min(num_wanted, room, plan.budget), plan)
            num_own += num_added
            num_counted += _counted(num_added, start, pair_share)
        num_tokens = num_own + num_others
        share = max(self._waiting.share_of_places(SHARE_PARTS), LEAST_SHARE)
        num_saved = self._num_saved_tokens + num_own - num_tokens * share // SHARE_PARTS
        self._num_saved_tokens = min(num_saved, _MAX_SAVED_STEPS * self._max_num_tokens)

    def state(self) -> list[int]:
        """The data on which the next turns depend, as plain values."""
        return [self._num_quiet_steps, self._mean_num_tokens, self._num_saved_tokens]

    def restore(self, state: Sequence[int]) -> None:
        """The inverse of `state`."""
        self._num_quiet_steps, self._mean_num_tokens, self._num_saved_tokens = state

    def _observe(self, others: Sequence[int]) -> None:
        """Notes the tokens of the rows of other prompts."""
        if not others:
            self._num_quiet_steps = min(self._num_quiet_steps + 1, QUIET_NUM_STEPS)
            return
        mean = sum(others) // len(others)
        is_first = self._num_quiet_steps == QUIET_NUM_STEPS
        self._mean_num_tokens = mean if is_first else (7 * self._mean_num_tokens + mean) // 8
        self._num_quiet_steps = 0

    def _pair_share(self) -> float:
        """The cost of attending to one token over that of a token; 0 where no shorter prompt waits."""
        return 0.0 if self._num_quiet_steps == QUIET_NUM_STEPS else self._times.pair_share

    def _most_tokens(self) -> int:
        """Tokens of prompts up to which long ones fill a step."""
        if self._num_quiet_steps == QUIET_NUM_STEPS:
            return self._max_num_step_tokens
        parts, whole = _TIMED_PARTS if self._times.pair_share else _PARTS
        return max(self._mean_num_tokens * parts // whole, self._max_num_tokens // 4)

    def _extend(self, place: int, num_tokens: int, plan: StepPlan) -> int:
        """Extends a row by so many tokens, if there are blocks and time for them; by how many it did."""
        request = plan.requests[place]
        if num_tokens > 0 and self._pace is not None:
            num_tokens = self._pace.cut(request, request.num_computed_tokens, num_tokens)
        if num_tokens <= 0 or not plan.has_room_for_prefill(num_tokens):
            return 0
        end = request.num_computed_tokens + num_tokens
        block_ids = [] if end <= request.num_slots else self._manager.allocate_slots(request.request_id, end)
        if block_ids is None:
            return 0
        request.num_slots += self._needs.num_slots(block_ids)
        plan.extend(place, num_tokens, block_ids)
        self._manager.cache_blocks(request.request_id, request.keys, end)
        return num_tokens


def _counted(num_tokens: int, start: int, pair_share: float) -> float:
    """Tokens at the beginning of a prompt, which attend to nothing, that take as long as these behind `start`."""
    return num_tokens * (1 + pair_share * (start + num_tokens / 2))


def _within(num_counted: float, start: int, pair_share: float) -> int:
    """The most tokens behind `start` that count as no more than so many."""
    return int(num_tokens_within(num_counted, 1 + pair_share * start, pair_share))


def goes_before_long(request: Request, plan: StepPlan) -> bool:
    """Whether a waiting request goes before the long prompts of a step: by its rank, or with at most half left.

    One that a whole step completes goes before them also where their last tokens are cut by time. Of what the cache
    has, only what is known from an earlier lookup counts.
    """
    num_left = request.num_tokens - max(request.num_computed_tokens, request.num_known_tokens)
    return num_left <= plan.num_first_tokens or all(
        request.rank < long.rank or 2 * num_left <= long.num_left_tokens for long, _ in plan.long_prompts
    )


def make_prompt_turns(
    config: SchedulerConfig,
    manager: KVCacheManager,
    needs: BlockNeeds,
    waiting: WaitingQueue,
    times: StepTimes,
    pace: PromptPace | None,
) -> PromptTurns | None:
    """As `PromptTurns`; None where prompts go by rank alone.

    Raises:
        ValueError: The model has states, which are kept where chunks end.
    """
    if not config.shorter_prompts_first:
        return None
    if manager.has_states:
        raise ValueError("--shorter-prompts-first is for models without states, whose prompts may be cut anywhere")
    return PromptTurns(config, manager, needs, waiting, times, pace)
