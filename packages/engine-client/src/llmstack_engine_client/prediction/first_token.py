"""When the first token of a request comes, from the state after the last step.

A closed formula in place of a simulation step by step: prompts are computed one after the other, so the steps before a
first token follow from the tokens before it. Its cost does not depend on the length of the queue.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from llmstack_engine_client.prediction.cost_model import CostModel, StepWork

if TYPE_CHECKING:
    from llmstack_core_scheduler import SchedulerConfig

# Chosen on 460 live requests of GPT-2's shape at 80 % load.
DEVIATIONS: Final = 0.5
MAX_LATER_SHARE: Final = 0.25
# As in `PromptPace` and `PromptTurns`, without an import of the scheduler.
MIN_PACED_TOKENS: Final = 8
ENOUGH_NUM_STEPS: Final = 3.0
COSTLY_NUM_BASES: Final = 6.0
LONG_NUM_STEPS: Final = 4
_MANY_TOKENS: Final = 64


class StepLimits(NamedTuple):
    """Limits of one step.

    Attributes:
        max_num_rows: Requests that may run.
        max_num_tokens: Tokens of a step.
        max_num_row_tokens: Tokens of one request in a step; 0 for no such limit.
        max_prefill_tokens: Prompt tokens of several requests in a step; 0 for no such limit.
        max_itl_ms: Milliseconds of a step with prompts beside running streams; 0 for no such limit.
        max_itl_steps: The same limit in steps of the streams alone; 0 for no such limit.
    """

    max_num_rows: int
    max_num_tokens: int
    max_num_row_tokens: int = 0
    max_prefill_tokens: int = 0
    max_itl_ms: float = 0.0
    max_itl_steps: float = 0.0
    shorter_prompts_first: bool = False

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """The limits of a scheduler's steps."""
        return cls(
            config.max_num_rows,
            config.max_num_batched_tokens,
            config.long_prefill_token_threshold,
            config.max_prefill_tokens,
            config.max_itl_ms,
            config.max_itl_steps,
            config.shorter_prompts_first,
        )

    def load_before(self, load: EngineLoad, num_tokens: int) -> EngineLoad:
        """The load before a prompt of so many tokens, if shorter ones go first: of a long one that runs, a step."""
        most = self.max_num_row_tokens or self.max_num_tokens
        num_left = load.num_prefill_tokens
        if num_left <= max(LONG_NUM_STEPS * most, 2 * num_tokens):
            return load
        return load._replace(num_prefill_tokens=most)

    def shared_tokens(self, budget: int, num_tokens: int, num_requests: int) -> int:
        """Prompt tokens of a step while so many requests with `num_tokens` in all go before; at most `budget`.

        Prompts that do not fit into one step together are alone in theirs.
        """
        if not self.max_prefill_tokens:
            return budget
        mean = -(-num_tokens // max(num_requests, 1))
        return min(budget, max(self.max_prefill_tokens, mean))

    def can_share(self, num_tokens: int, num_others: int) -> bool:
        """Whether the last `num_others` prompt tokens of others and the first ones of a prompt share a step."""
        return not num_others or not self.max_prefill_tokens or num_others + num_tokens <= self.max_prefill_tokens


class EngineLoad(NamedTuple):
    """An engine core after a step.

    Attributes:
        end_s: When that step ended, and the next one began, if there was work.
        num_running: Requests that run.
        num_prefill_tokens: Tokens of these that are to be computed before their next token.
        num_waiting: Requests that wait.
        num_waiting_tokens: Tokens of these that will be computed.
        num_context_tokens: Tokens whose KV the running requests have.
    """

    end_s: float = 0.0
    num_running: int = 0
    num_prefill_tokens: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_context_tokens: int = 0


class QueuedTokens(NamedTuple):
    """The queued requests that go before a request.

    Attributes:
        num_waiting: Tokens of requests that the last step knew.
        num_coming: Tokens of later ones.
        num_requests: The number of both.
        num_others: Waiting tokens that go after the request, but may be part of the step under way.
        coming_s: When the first of the later ones came, where there is one.
    """

    num_waiting: int = 0
    num_coming: int = 0
    num_requests: int = 0
    num_others: int = 0
    coming_s: float = 0.0


class Arrivals(NamedTuple):
    """The prompts that come, as far as the last seconds tell.

    Attributes:
        tokens_per_s: Their tokens per second.
        squares_per_s: The squares of their tokens per second.
    """

    tokens_per_s: float = 0.0
    squares_per_s: float = 0.0

    def in_time(self, seconds: float) -> float:
        """Tokens of those that come within some time: the mean, and a part of the standard deviation.

        They come by chance, mostly none or a whole prompt. Nothing can come before the prediction without them, so
        that one somewhat later is near the token more often than the mean.
        """
        return self.tokens_per_s * seconds + DEVIATIONS * sqrt(self.squares_per_s * seconds)


class FirstToken(NamedTuple):
    """A prediction for one request, in seconds from now.

    Attributes:
        wait_s: Until its first tokens are computed.
        ttft_s: Until its first token.
    """

    wait_s: float
    ttft_s: float


NO_ARRIVALS: Final = Arrivals()


def first_token(
    load: EngineLoad,
    limits: StepLimits,
    model: CostModel,
    before: QueuedTokens,
    num_tokens: int,
    now_s: float,
    *,
    departures_per_s: float = 0.0,
    free_s: float | None = None,
    arrivals: Arrivals = NO_ARRIVALS,
) -> FirstToken:
    """Predicts the first token of a request that arrives at `now_s`.

    Args:
        load: The load after the last reported step.
        limits: The limits of a step.
        model: Predicts the duration of a step.
        before: The queued requests that go before this one.
        num_tokens: Tokens of its prompt that must be computed.
        now_s: The time, on the clock of `load`.
        departures_per_s: Running requests that end per second; it counts where all places are taken.
        free_s: When a place is free, as far as that is known: all before it have one by then, and their prompts are
            computed. None where one is free, or nothing is known.
        arrivals: Later requests, which become part of the last step.
    """
    if limits.shorter_prompts_first:
        load = limits.load_before(load, num_tokens)
    steps = _Steps(load, limits, model, min(load.num_running, limits.max_num_rows))
    budget, num_before = steps.budget, load.num_prefill_tokens + before.num_waiting + before.num_coming
    shared = limits.shared_tokens(budget, num_before, before.num_requests)
    begins_s, num_left = _after_step_under_way(steps, shared, before, now_s)
    num_computed = (num_left + num_tokens) // 2
    begins_s += num_left // shared * steps.seconds(shared, num_computed)
    num_others = num_left % shared
    if not limits.can_share(num_tokens, num_others):
        begins_s += steps.seconds(num_others, num_computed)
        num_others = 0
    num_too_many = before.num_requests + 1 - (limits.max_num_rows - load.num_running)
    if free_s is not None:
        begins_s, num_left, num_others, arrivals = max(free_s, now_s), 0, 0, NO_ARRIVALS
    elif num_too_many > 0 and departures_per_s > 0:
        begins_s = max(begins_s, load.end_s + num_too_many / departures_per_s)
    wait_s = max(begins_s - now_s, 0.0)
    num_further_steps, num_last = _own_steps(budget, limits.max_num_row_tokens, num_tokens, num_others)
    until_s = wait_s + num_further_steps * steps.seconds(budget, num_computed)
    num_computed = num_left + num_tokens - num_last
    last_s = steps.seconds(num_last, num_computed)
    room = min(limits.max_prefill_tokens or budget, budget)
    num_filled = max(min(num_last + int(arrivals.in_time(until_s)), room), num_last)
    later_s = min(steps.seconds(num_filled, num_computed) - last_s, MAX_LATER_SHARE * (until_s + last_s))
    return FirstToken(wait_s, until_s + last_s + later_s)


class _Steps(NamedTuple):
    """The steps to come, as far as the running requests have rows in each."""

    load: EngineLoad
    limits: StepLimits
    model: CostModel
    num_rows: int

    @property
    def budget(self) -> int:
        """Prompt tokens that a step has room for, and time."""
        budget, limits = max(self.limits.max_num_tokens - self.num_rows, 1), self.limits
        num_streams = self.num_rows - (self.load.num_prefill_tokens > 0)
        if not (limits.max_itl_ms or limits.max_itl_steps) or num_streams < 1:
            return budget
        streams_s = self.seconds(0, 0)
        left_s = limits.max_itl_ms / 1000.0 - streams_s
        if not limits.max_itl_ms:
            enough_s = max((ENOUGH_NUM_STEPS - 1) * streams_s, COSTLY_NUM_BASES * self.model.step_s(StepWork(0, 0, 0)))
            left_s = min((limits.max_itl_steps - 1) * streams_s, enough_s)
        token_s = (self.seconds(_MANY_TOKENS, 0) - streams_s) / _MANY_TOKENS
        if token_s <= 0:
            return budget
        return min(budget, max(int(left_s / token_s), MIN_PACED_TOKENS))

    def seconds(self, num_prefill_tokens: int, num_computed: int) -> float:
        """The time of a step with so many prompt tokens, after `num_computed` others."""
        context = self.load.num_context_tokens + num_computed + num_prefill_tokens
        return self.model.step_s(StepWork(num_prefill_tokens, self.num_rows, context))


def _after_step_under_way(steps: _Steps, shared: int, before: QueuedTokens, now_s: float) -> tuple[float, int]:
    """When the step under way ends, which the request is no part of, and the tokens before it that are left then."""
    load = steps.load
    num_left = load.num_prefill_tokens + before.num_waiting
    if load.num_running or num_left + before.num_others:
        num_under_way = min(shared, num_left + before.num_others)
        end_s = load.end_s + steps.seconds(num_under_way, 0)
        return max(end_s, now_s), max(num_left - num_under_way, 0) + before.num_coming
    if before.num_coming:  # the first of these began it
        num_under_way = min(shared, before.num_coming)
        end_s = before.coming_s + steps.seconds(num_under_way, 0)
        return max(end_s, now_s), before.num_coming - num_under_way
    return now_s, num_left


def _own_steps(budget: int, max_num_row_tokens: int | None, num_tokens: int, num_others: int) -> tuple[int, int]:
    """Steps of its prompt before the last one, and the tokens of that; the first has `num_others` tokens of others."""
    own_budget = min(budget, max_num_row_tokens or budget)
    num_first = min(budget - num_others, own_budget)
    if num_tokens <= num_first:
        return 0, num_others + num_tokens
    num_further_steps = -(-(num_tokens - num_first) // own_budget)
    return num_further_steps, num_tokens - num_first - (num_further_steps - 1) * own_budget
