"""Predictions for one engine core, calibrated by what it reports after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llmstack_engine_client.prediction.cost_model import LinearCostModel, StepWork
from llmstack_engine_client.prediction.first_token import (
    Arrivals,
    EngineLoad,
    FirstToken,
    QueuedTokens,
    StepLimits,
    first_token,
)
from llmstack_engine_client.prediction.places import AnswerLengths, Places
from llmstack_engine_client.prediction.step_costs import Speed, StepCosts
from llmstack_types import RequestProgress, SchedulerStats

_SMOOTHING: Final = 0.02
# Arrivals are counted over about so many seconds.
_ARRIVALS_MEMORY_S: Final = 10.0
_DECODE_INTERVAL: Final = 4
_STEP_SMOOTHING: Final = 1 / 256
# Further waiting requests count with the mean of these, which bounds the cost of a prediction to some 50 microseconds.
MAX_NUM_COUNTED: Final = 256
# A pause between two reports beyond so many times a step was no step.
_MAX_GAP: Final = 50.0


class EnginePredictor:
    """The state of one engine core, its cost model, and the habits of its requests.

    Attributes:
        load: The state after the last step.
        costs: The cost model.
        found_share: The share of the prompts' tokens that is found in the prefix cache.
        answer_lengths: The lengths of the answers that have ended.
        known_places: The places after the last step, once they were needed; requests that come are to be added.
    """

    def __init__(self, limits: StepLimits, block_size: int = 16) -> None:
        self.load = EngineLoad()
        self.costs = StepCosts()
        self.found_share = 0.0
        self.block_size = block_size
        self._limits = limits
        self._last = SchedulerStats()
        self.answer_lengths = AnswerLengths()
        self.known_places: Places | None = None
        self._num_queries = self._num_hits = self._mean_s = 0.0
        self._speed = Speed()
        self._model: LinearCostModel | None = None  # at the speed after the last step, once it was needed
        self._num_rows = self._num_drafts = self._num_accepted = 0.0
        self._num_arrived = self._num_squares = self._arrivals_s = 0.0

    def observe(self, stats: SchedulerStats, end_s: float, work_s: float | None) -> None:
        """Processes the report of a step that ended at `end_s`.

        `work_s`: How long it took as far as the engine core measured it; counted where the time since the step before
        is no measure, since nothing was to be done or its report is missing.
        """
        last, load = self._last, self.load
        self._last, self.known_places, self._model = stats, None, None
        num_context = (stats.num_blocks - stats.num_free_blocks) * self.block_size
        self.load = EngineLoad(
            end_s,
            stats.num_running,
            stats.num_running_prefill_tokens,
            stats.num_waiting,
            int(stats.num_waiting_prefill_tokens * (1.0 - self.found_share)),
            num_context,
        )
        if stats.step < last.step:  # another engine core, whose first prompts tell what is found
            self._num_queries = self._num_hits = 0.0
            self.found_share = self.found_share if stats.disk is not None else 0.0
            return
        if stats.num_scheduled_tokens:
            is_next = stats.step == last.step + 1 and (load.num_running or load.num_waiting)
            seconds = end_s - load.end_s if is_next else work_s
            if work_s is not None and seconds is not None and seconds > _MAX_GAP * work_s:
                seconds = work_s
            if seconds is not None and seconds > 0:
                self._learn(stats, stats.num_draft_tokens - last.num_draft_tokens, num_context, seconds)
            self._num_rows += _SMOOTHING * (stats.num_scheduled_rows - self._num_rows)
            self._num_drafts += _SMOOTHING * (stats.num_draft_tokens - last.num_draft_tokens - self._num_drafts)
            num_accepted = stats.num_accepted_draft_tokens - last.num_accepted_draft_tokens
            self._num_accepted += _SMOOTHING * (num_accepted - self._num_accepted)
        num_queries = stats.prefix_cache_queries - last.prefix_cache_queries
        if num_queries > 0:
            self._num_queries += _SMOOTHING * (num_queries - self._num_queries)
            self._num_hits += _SMOOTHING * (stats.prefix_cache_hits - last.prefix_cache_hits - self._num_hits)
            self.found_share = min(max(self._num_hits / self._num_queries, 0.0), 1.0)

    def _learn(self, stats: SchedulerStats, num_drafts: int, num_context_tokens: int, seconds: float) -> None:
        self._mean_s += (seconds - self._mean_s) * (_STEP_SMOOTHING if self._mean_s else 1.0)
        num_prompt_tokens = stats.num_scheduled_tokens - stats.num_scheduled_rows  # a prompt counts as a decode too
        # As in `step_work`. Reports of steps may be missing, whose drafts the counter has.
        num_drafts = min(max(num_drafts, 0), num_prompt_tokens)
        num_prompt_tokens -= num_drafts
        num_rows = stats.num_scheduled_rows + num_drafts
        work = StepWork(num_prompt_tokens, num_rows, num_context_tokens)
        self._speed.observe(work, seconds, self.costs.last_model)
        # Of steps that only decode, nearly all equal, a part is enough.
        if num_prompt_tokens > 0 or not stats.step % _DECODE_INTERVAL:
            self.costs.observe(work, seconds)

    def note_arrival(self, num_tokens: int, now_s: float) -> None:
        """Notes the prompt of a request."""
        kept = max(1.0 - (now_s - self._arrivals_s) / _ARRIVALS_MEMORY_S, 0.0)
        self._num_arrived = self._num_arrived * kept + num_tokens
        self._num_squares = self._num_squares * kept + num_tokens * num_tokens
        self._arrivals_s = now_s

    def places(self, requests: Sequence[RequestProgress], num_uncounted: int = 0) -> Places:
        """The places after the last step, with the requests in flight; as `Places.add_all`."""
        tokens_per_step = 1.0 + self._num_accepted / max(self._num_rows, 1.0)
        places = Places(self._limits.max_num_rows, tokens_per_step, self.answer_lengths.stop_rate)
        places.add_all(requests, num_uncounted)
        return places

    def predict(
        self,
        before: QueuedTokens,
        num_tokens: int,
        now_s: float,
        progress: Callable[[int], Sequence[RequestProgress]] | None = None,
        num_queued: int = 0,
    ) -> FirstToken | None:
        """The prediction for a request that arrives now; None before the steps were measured.

        `progress`: Gives the first requests in flight, in the order of their arrival; None where it is not known, or
        where they get their places in another order.
        `num_queued`: Requests without a first token.
        """
        if self._model is None and (fitted := self.costs.model()) is not None:
            self._model = self._speed.scaled(fitted)
        model = self._model
        if model is None:
            return None
        max_num_rows, places = self._limits.max_num_rows, None
        if progress is not None and self.load.num_running + self.load.num_waiting + num_queued >= max_num_rows:
            places = self._places_now(progress)
        num_rows = max(self.load.num_running, max_num_rows // 2)  # it matters where nearly all places are taken
        return first_token(
            self.load, self._limits, model, before, num_tokens, now_s,
            departures_per_s=num_rows / (max(self.answer_lengths.mean, 1.0) * self._mean_s),
            free_s=None if places is None else self._free_s(places, model, before, now_s),
            arrivals=Arrivals(self._num_arrived / _ARRIVALS_MEMORY_S, self._num_squares / _ARRIVALS_MEMORY_S),
        )  # fmt: skip

    def _places_now(self, progress: Callable[[int], Sequence[RequestProgress]]) -> Places:
        """The places of now; all are taken, or nearly."""
        if self.known_places is None:
            requests = progress(self._limits.max_num_rows + MAX_NUM_COUNTED)
            num_uncounted = self.load.num_running + self.load.num_waiting - len(requests)
            self.known_places = self.places(requests, max(num_uncounted, 0))
        return self.known_places

    def _free_s(self, places: Places, model: LinearCostModel, before: QueuedTokens, now_s: float) -> float | None:
        """When a further request has a place; None where one is free."""
        num_steps, load = places.num_steps, self.load
        if not num_steps:
            return None
        num_rows = round(self._limits.max_num_rows * (1.0 + self._num_drafts / max(self._num_rows, 1.0)))
        decode_s = model.step_s(StepWork(0, num_rows, load.num_context_tokens))
        num_tokens = round(places.num_prompt_tokens * (1.0 - self.found_share))
        prompts_s = model.step_s(StepWork(num_tokens, num_rows, load.num_context_tokens)) - decode_s
        is_idle = not (load.num_running or load.num_waiting)  # then the first of those that came later began a step
        begin_s = load.end_s if not is_idle else before.coming_s if before.num_coming else now_s
        return begin_s + num_steps * decode_s + prompts_s
