"""The state of the queue: reports of engine cores, and requests on their way."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from llmstack_engine_client.prediction import FirstToken, StepLimits
from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.state.first_tokens import FirstTokens, Lateness, PendingRequest
from llmstack_server.state.queue_wait import MAX_WAIT_S, QueueState, predict_wait
from llmstack_server.state.request_sizes import SMOOTHING, RequestSizes
from llmstack_types import EngineReady, SamplingParams, SchedulerStats

# Requests often begin and end together, so a rate is the mean over several service times.
MIN_MEMORY_S = 5.0
SERVICE_TIMES = 4.0
# A rate counts from here on: time with requests waiting, and steps that admitted some.
MIN_MEASURED_S = 0.25
MIN_NUM_ADMISSIONS = 2
# A request that was submitted so long ago is part of every report.
REPORT_TIMEOUT_S = 1.0


class DrainRate:
    """Tokens per second that one engine core admits while requests wait.

    Attributes:
        last: The last report.
        reported_s: When it came.
        tokens_per_s: The rate; None until it was measured for long enough.
    """

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self.last = SchedulerStats()
        self.reported_s = 0.0
        self._last_s: float | None = None
        self._num_tokens = 0.0
        self._measured_s = 0.0
        self._num_admissions = 0

    def observe(self, stats: SchedulerStats, time_s: float, memory_s: float) -> None:
        """Processes a report; the weight of reports older than `memory_s` decreases."""
        last, last_s, self.last, self._last_s = self.last, self._last_s, stats, time_s
        num_tokens = stats.num_admitted_tokens - last.num_admitted_tokens
        # Time without waiting requests says nothing; a smaller counter is that of another engine core.
        if last_s is None or num_tokens < 0 or time_s <= last_s or not last.num_waiting_tokens:
            return
        if not (num_tokens or stats.num_waiting_tokens):
            return  # all were aborted
        duration_s = time_s - last_s
        kept = math.exp(-duration_s / memory_s)
        self._num_tokens = self._num_tokens * kept + num_tokens
        self._measured_s = self._measured_s * kept + duration_s
        self._num_admissions += num_tokens > 0
        is_known = self._measured_s >= MIN_MEASURED_S and self._num_admissions >= MIN_NUM_ADMISSIONS
        self.tokens_per_s = self._num_tokens / self._measured_s if is_known else None


current_request: ContextVar[PendingRequest | None] = ContextVar("pending_request", default=None)
"""The request that is being answered; None where it does not wait for the engine."""


class QueueMonitor:
    """Follows the queues of all engine cores; a `StatLogger` of the engine front end.

    Attributes:
        first_tokens: Predicts the first tokens of requests, and corrects itself by the real ones.
        lateness: How much later than expected these come.
        sizes: Estimates the tokens of requests by the length of their bodies.
    """

    def __init__(
        self,
        max_num_running: int = 256,
        quantum: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_num_row_tokens: int = 0,
        max_prefill_tokens: int = 0,
        max_itl_ms: float = 0.0,
        max_itl_steps: float = 0.0,
        shorter_prompts_first: bool = False,
        step_tokens: Callable[[int], int] | None = None,
        has_deadlines: bool = False,
    ) -> None:
        """`max_num_running` requests run at one time in each engine core; `quantum` as in `QueueState`.

        `max_num_row_tokens`: Of one request in a step; 0 for no limit.
        `max_prefill_tokens`: Of prompts of several requests in a step; 0 for no limit.
        `max_itl_ms`, `max_itl_steps`: Of a step beside running streams, as in `StepLimits`; 0 for no limit.
        `shorter_prompts_first`: As in `StepLimits`.
        `step_tokens`: Gives the tokens of a step for the longest length of a request.
        `has_deadlines`: Requests of one tenant go by their deadlines.
        """
        limits = StepLimits(
            max_num_running, 2048, max_num_row_tokens, max_prefill_tokens, max_itl_ms, max_itl_steps,
            shorter_prompts_first,
        )  # fmt: skip
        self.first_tokens = FirstTokens(limits, quantum, has_deadlines=has_deadlines)
        self.lateness = Lateness()
        self._step_tokens = step_tokens
        self._max_num_running = max_num_running
        self._quantum = quantum
        self._clock = clock
        self._engines: dict[int, DrainRate] = {}
        self._pending: dict[int, PendingRequest] = {}
        self._drained: asyncio.Future[None] | None = None  # there is one while something waits for it
        self._service_s = 0.0
        self.sizes = RequestSizes()

    def log_engine_initialized(self, ready: EngineReady) -> None:
        """An engine core can take requests; nothing is known of its rate yet."""
        self._max_num_running = ready.max_num_rows or self._max_num_running
        self.sizes.set_model(takes_pictures=ready.media is not None and "image" in ready.media.num_layers)
        max_num_tokens = 2048 if self._step_tokens is None else self._step_tokens(ready.max_model_len)
        self.first_tokens.log_engine_initialized(ready, max_num_tokens)

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats) -> None:
        """Processes the report of an engine core after a step."""
        for finished in iteration_stats.finished_requests:
            if finished.inference_time_s is not None:
                self._service_s += SMOOTHING * (finished.inference_time_s - self._service_s)
        if scheduler_stats is None:
            return
        engine = self._engines.get(iteration_stats.engine_index)
        if engine is None:
            engine = self._engines[iteration_stats.engine_index] = DrainRate()
        engine.observe(scheduler_stats, iteration_stats.timestamp_s, max(MIN_MEMORY_S, SERVICE_TIMES * self._service_s))
        engine.reported_s = self._clock()
        self.first_tokens.observe(scheduler_stats, iteration_stats, engine.reported_s)
        if self._pending:
            phases = iteration_stats.phases
            self._forget_reported(iteration_stats.timestamp_s - (0.0 if phases is None else sum(phases)))
        if self._drained is not None and not scheduler_stats.num_waiting_tokens:
            self._drained.set_result(None)
            self._drained = None

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for the engine."""
        return self.state().num_waiting_tokens > 0

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for the engine or runs in it."""
        return not (self.is_busy or self.first_tokens.num_running)

    async def wait_until_drained(self) -> None:
        """Waits until an engine core reports that no request waits for it, or until what is on its way is forgotten."""
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._drained], timeout=REPORT_TIMEOUT_S)

    def state(self) -> QueueState:
        """The state of all queues together, with the requests that are on their way."""
        engines, now_s = self._engines.values(), self._clock()
        rates = [rate for engine in engines if (rate := engine.tokens_per_s) is not None]
        if not rates:
            return QueueState(quantum=self._quantum)
        tenant_to_tokens: Counter[str] = Counter()
        for engine in engines:
            stats = engine.last
            tenant_to_tokens.update(dict(zip(stats.waiting_tenants, stats.num_waiting_tokens_per_tenant, strict=True)))
        num_waiting = sum(engine.last.num_waiting_tokens for engine in engines)
        num_free = 0
        if not num_waiting:
            num_free = self._max_num_running * len(engines) - sum(engine.last.num_running for engine in engines)
        self._forget_reported(now_s - REPORT_TIMEOUT_S)
        for request in self._pending.values():
            if num_free > 0:
                num_free -= 1  # it will not wait
                continue
            num_waiting += request.num_tokens
            tenant_to_tokens[request.tenant] += request.num_tokens
        # An engine core whose queue was never full drains as fast as the others.
        per_s = sum(rates) * len(engines) / len(rates)
        age_s = now_s - max(engine.reported_s for engine in engines)
        return QueueState(per_s, num_waiting, tenant_to_tokens, self._quantum, max(age_s, 0.0))

    def predict_wait(self, tokens: int, tenant: str) -> float | None:
        """`predict_wait` on the current state; None before steps, or a rate, were measured."""
        ahead = self.first_tokens
        num_pending = len(self._pending)
        num_places = self._max_num_running * len(self._engines) - ahead.num_running
        if ahead.is_calibrated and not (ahead.num_waiting or ahead.queued) and num_pending < num_places:
            return 0.0  # it is part of the next step
        is_rated = any(engine.tokens_per_s is not None for engine in self._engines.values())
        if ahead.is_calibrated and not (is_rated and ahead.is_blocked):
            prediction = ahead.predict(1, tokens, tenant, None, self._clock())
            return None if prediction is None else min(prediction.wait_s, MAX_WAIT_S)
        return predict_wait(self.state(), tokens, tenant) if is_rated else None

    def seconds_after_wait(self, num_tokens: int) -> float:
        """Seconds from the end of its wait to the first token of a request with so many tokens in the queue."""
        num_prompt_tokens = max(num_tokens - int(self.sizes.num_output_tokens), 1)
        return self.first_tokens.own_seconds(num_prompt_tokens, self._clock())

    def predict_first_token(
        self, num_prompt_tokens: int, num_tokens: int, tenant: str, left_s: float | None = None
    ) -> FirstToken | None:
        """When the first token of a request comes that is submitted now; None before enough steps were measured.

        `num_tokens`: Its tokens in the queue, its output included.
        `left_s`: The seconds until the client's deadline.
        """
        now_s = self._clock()
        wanted_s = None if left_s is None else now_s + left_s
        prediction = self.first_tokens.predict(num_prompt_tokens, num_tokens, tenant, wanted_s, now_s)
        if prediction is None or not self.first_tokens.is_blocked:
            return prediction
        wait_s = self.predict_wait(num_tokens, tenant)
        return prediction if wait_s is None else FirstToken(wait_s, wait_s + prediction.ttft_s - prediction.wait_s)

    def admit(
        self,
        num_prompt_tokens: int,
        num_output_tokens: int,
        left_s: float | None,
        params: SamplingParams | None = None,
    ) -> PendingRequest | None:
        """Predicts the current request, which is about to be submitted; None without one.

        `num_output_tokens`: Its output as far as the queue counts it.
        `params`: What it asks for.
        """
        request = current_request.get()
        if request is None:
            return None
        is_pending = self._pending.pop(id(request), None) is not None  # it does not wait for itself
        num_tokens = num_prompt_tokens + num_output_tokens
        request.prediction = self.predict_first_token(num_prompt_tokens, num_tokens, request.tenant, left_s)
        if is_pending:
            self._pending[id(request)] = request
        now_s = self._clock()
        request.num_prompt_tokens, request.submitted_s = num_prompt_tokens, now_s
        request.wanted_s = None if left_s is None else now_s + left_s
        self.first_tokens.submit(request, now_s, params)
        return request

    def forget(self, request: PendingRequest) -> None:
        """The request is not submitted after all."""
        self.first_tokens.queued.pop(id(request), None)

    @contextmanager
    def pending(self, num_tokens: int, tenant: str, num_bytes: int | None = None) -> Iterator[PendingRequest]:
        """Counts a request as waiting, until a report has it or the block ends."""
        request = PendingRequest(num_tokens, tenant, num_bytes)
        self._pending[id(request)] = request
        current_request.set(request)
        try:
            yield request
        finally:
            self._pending.pop(id(request), None)
            self.first_tokens.queued.pop(id(request), None)

    def note_submitted(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Notes that the current request was submitted, with what it counts with."""
        request = current_request.get()
        if request is None:
            return
        self.sizes.observe(request.num_bytes, num_prompt_tokens, num_output_tokens)
        request.num_tokens = num_prompt_tokens + num_output_tokens
        request.submitted_s = self._clock()

    def _forget_reported(self, start_s: float) -> None:
        """Forgets what was submitted before a step that has been reported began."""
        reported = [
            key
            for key, request in self._pending.items()
            if request.submitted_s is not None and request.submitted_s < start_s
        ]
        for key in reported:
            del self._pending[key]
