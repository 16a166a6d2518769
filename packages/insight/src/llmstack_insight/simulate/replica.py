"""One simulated engine core: the real scheduler and cache on a clock of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_engine_client.prediction.cost_model import CostModel, step_work
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_engine_core.messages.protocol import CacheUpdate
from llmstack_insight.simulate.predictions import TracePredictor
from llmstack_insight.simulate.report import Report
from llmstack_insight.simulate.traces import TraceRequest
from llmstack_kv_cache import CachedSegments, KVCacheManager
from llmstack_kv_cache.segments import pack_keys
from llmstack_step_log.replay.driver import NoProgressError, SchedulerDriver
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, SamplingParams, ScheduledRequest, SchedulerOutput

OUTPUT_TOKEN_ID = 0
CALL_TOKEN_ID = 1
"""The last token of an answer that calls a tool."""
MAX_EVENTS_PER_STEP = 1 << 20


class PromptCacheManager(KVCacheManager):
    """Caches prompts only: a trace does not say what a later prompt repeats of an answer."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        *,
        caches_answers: bool = False,
        knows_sessions: bool = False,
    ) -> None:
        """`caches_answers`: Where later prompts do repeat them."""
        super().__init__(num_blocks, block_size, enable_prefix_caching, knows_sessions=knows_sessions)
        self.num_prompt_tokens: dict[str, int] = {}
        self._caches_answers = caches_answers

    def cache_blocks(self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Makes the full blocks of the prompt findable, or all of them."""
        if not self._caches_answers:
            num_computed_tokens = min(num_computed_tokens, self.num_prompt_tokens[request_id])
        super().cache_blocks(request_id, token_ids, num_computed_tokens)


def last_token_id(ends_with_call: bool) -> int:
    """The last token of an answer."""
    return CALL_TOKEN_ID if ends_with_call else OUTPUT_TOKEN_ID


@dataclass(slots=True)
class _Progress:
    arrival_s: float
    num_prompt_tokens: int
    last_place: int
    last_token_id: int
    last_token_s: float = -1.0
    num_output_tokens: int = 0


class Replica:
    """Takes requests, and computes them step by step.

    Attributes:
        num_computed_tokens: Counter of the tokens of prompts that it did not find in its cache.
        begun_ids: Requests that have got their first token since the list was emptied.
        ended_ids: Requests that have ended since then.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        cache: PromptCacheManager,
        cost_model: CostModel,
        make_prompt: Callable[[TraceRequest], list[int]],
        max_made: int,
        report: Report,
        predictor: TracePredictor | None = None,
    ) -> None:
        """`max_made`: Prompts that may wait inside the scheduler; the others are not made before they are due.

        `predictor`: Predicts each request; None predicts nothing.

        `make_prompt`: Makes the token ids.
        """
        self.num_computed_tokens = 0
        self.begun_ids: list[str] = []
        self.ended_ids: list[str] = []
        self._cache = cache
        self._driver = SchedulerDriver(Scheduler(limits, cache))
        self._cost_model = cost_model
        self._make_prompt = make_prompt
        self._max_made = max_made
        self._report = report
        self._predictor = predictor
        self._queue: deque[tuple[str, TraceRequest, float]] = deque()
        self._not_begun: dict[str, None] = {}
        self._progress: dict[str, _Progress] = {}
        self._segments: CachedSegments | None = None
        self._update_number = 0
        if predictor is not None:
            predictor.note_update(self.follow_cache())

    @property
    def now_s(self) -> float:
        """Its time: the end of its last step."""
        return self._driver.now_s

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._progress) + len(self._queue)

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._not_begun) + len(self._queue)

    @property
    def num_preemptions(self) -> int:
        """Counter of the scheduler's preemptions."""
        return self._driver.scheduler.stats().num_preemptions

    @property
    def num_evictions(self) -> int:
        """Counter of the cache's evictions."""
        return self._cache.stats().num_evictions

    def follow_cache(self) -> CacheUpdate:
        """Begins to record changes of the cache, which is empty now, for `take_update`."""
        self._cache.start_events(MAX_EVENTS_PER_STEP)
        self._segments = CachedSegments(self._cache.block_size)
        return CacheUpdate(self._update_number, is_whole=True)

    def take_update(self) -> CacheUpdate | None:
        """The changes of the cache since the last call."""
        if self._segments is None:
            return None
        for event in self._cache.fetch_events()[0]:
            self._segments.apply(event)
        if not self._segments.has_changes:
            return None
        _, added, removed = self._segments.take()
        self._update_number += 1
        return CacheUpdate(self._update_number, False, pack_keys(added), pack_keys(removed))

    def submit(self, request_id: str, request: TraceRequest, arrival_s: float) -> None:
        """Takes a request; where it has nothing else to do, its time goes on to the arrival."""
        if not self.num_requests:
            self._driver.now_s = max(self.now_s, arrival_s)
        self._queue.append((request_id, request, arrival_s))
        if self._predictor is not None:
            self._predictor.submit(request_id, self._make_prompt(request), arrival_s)

    def step(self) -> None:
        """One step, before which due requests are made.

        Raises:
            SimulationError: The scheduler makes no progress.
        """
        if self._predictor is not None:
            self._predictor.publish()
        while self._queue and len(self._not_begun) < self._max_made:
            self._add(*self._queue.popleft())
        if not self._driver.scheduler.has_unfinished_requests():
            return
        began_s = self.now_s
        try:
            scheduled, outputs = self._driver.step(self._sample, self._step_s)
        except NoProgressError as error:
            raise SimulationError(str(error)) from error
        self._note_begun(scheduled, began_s)
        self._take(outputs)
        if self._predictor is not None:
            self._report_step(self._predictor, outputs, began_s)
        report = self._report
        report.num_steps += 1
        report.max_running = max(report.max_running, len(scheduled.scheduled_requests))

    def _sample(self, rows: Sequence[ScheduledRequest]) -> list[list[int]]:
        """A token for each row that reaches the end of what is known, and none for a chunk of a prompt."""
        progress = self._progress
        sampled = []
        for row in rows:
            one = progress[row[0]]  # a named tuple; by index it is faster
            is_chunk = row[1] + row[2] < one.num_prompt_tokens + one.num_output_tokens
            token_id = one.last_token_id if one.num_output_tokens == one.last_place else OUTPUT_TOKEN_ID
            sampled.append([] if is_chunk else [token_id])
        return sampled

    def _step_s(self, rows: Sequence[ScheduledRequest]) -> float:
        return self._cost_model.step_s(step_work(rows))

    def _report_step(self, predictor: TracePredictor, outputs: EngineCoreOutputs, began_s: float) -> None:
        """Reports what the API process would learn of the step."""
        update = self.take_update()
        if update is not None:
            predictor.note_update(update)
        if outputs.scheduler_stats is not None:
            predictor.report(outputs.scheduler_stats, began_s, self.now_s)
        if not self.has_work():
            predictor.publish()

    def has_work(self) -> bool:
        """Whether another step would compute something, or end what has been computed."""
        return bool(self._queue) or self._driver.scheduler.has_unfinished_requests()

    def _add(self, request_id: str, request: TraceRequest, arrival_s: float) -> None:
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0, seed=0)
        arrival = EngineCoreRequest(request_id, self._make_prompt(request), params, arrival_time_s=arrival_s)
        if not self._driver.add(arrival):
            self._report.num_refused += 1
            self.ended_ids.append(request_id)
            if self._predictor is not None:
                self._predictor.note_refusal(request_id)
            return
        self._cache.num_prompt_tokens[request_id] = request.num_prompt_tokens
        self._progress[request_id] = _Progress(
            arrival_s, request.num_prompt_tokens, request.num_output_tokens - 1, last_token_id(request.ends_with_call)
        )
        self._not_begun[request_id] = None

    def _note_begun(self, scheduled: SchedulerOutput, began_s: float) -> None:
        for request in scheduled.new_requests:
            request_id = request.request_id
            if request_id in self._not_begun:  # not one that was preempted
                del self._not_begun[request_id]
                self._report.queue_s.append(began_s - self._progress[request_id].arrival_s)

    def _take(self, outputs: EngineCoreOutputs) -> None:
        now_s, report = self.now_s, self._report
        for output in outputs.outputs:
            progress = self._progress[output.request_id]
            if progress.last_token_s >= 0:
                report.itl_s.append(now_s - progress.last_token_s)
            else:
                num_hit_tokens = max(output.num_cached_tokens, 0)
                report.ttft_s.append(now_s - progress.arrival_s)
                report.num_hit_tokens += num_hit_tokens
                report.hit_tokens.append(num_hit_tokens)
                self.num_computed_tokens += progress.num_prompt_tokens - num_hit_tokens
                self.begun_ids.append(output.request_id)
                if self._predictor is not None:
                    self._predictor.note_first(output.request_id, now_s)
            progress.last_token_s = now_s
            progress.num_output_tokens += len(output.new_token_ids)
            report.num_output_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                report.num_requests += 1
                report.num_prompt_tokens += progress.num_prompt_tokens
                self.ended_ids.append(output.request_id)
                if self._predictor is not None:
                    self._predictor.note_end(output.request_id, progress.num_output_tokens)
                del self._progress[output.request_id]
                del self._cache.num_prompt_tokens[output.request_id]
        if self._predictor is not None:
            self._predictor.note_tokens(outputs.outputs)
