"""The first tokens of requests, predicted and compared with the real ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from llmstack_engine_client.prediction import MAX_NUM_COUNTED, EnginePredictor, FirstToken, QueuedTokens, StepLimits
from llmstack_llm.outputs.stats import IterationStats
from llmstack_types import EngineReady, RequestProgress, SamplingParams, SchedulerStats
from llmstack_types.engine_core import IMPLIED_DEADLINE_S

# An engine core on another machine has another clock; its reports count from when they came.
_MAX_REPORT_AGE_S: Final = 5.0
_SMOOTHING: Final = 0.05
# Requests that came after a prediction made a token late: that is no overhead, and has no limit.
_MAX_CORRECTION_S: Final = 0.02
_MAX_OVERHEAD_S: Final = 1.0
_IN_TIME_SHARE: Final = 0.95
# Shares of the limit. The first tokens of an overload come only after the limit: until then this has to do.
_FIRST_ALLOWANCE: Final = 0.2
_ALLOWANCE_STEP: Final = 0.02
_MAX_ALLOWANCE: Final = 0.5
# The mean time that headers may wait to be read, as a share of the limit: a busy moment of the machine is no overload.
_MAX_UNREAD: Final = 0.05
_LEAST_MAX_UNREAD_S: Final = 0.1
_MIN_UNREAD_S: Final = 0.0005


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that was accepted, until its first token.

    Attributes:
        num_tokens: Its tokens in the queue: estimated from its size, exact once it is submitted.
        num_prompt_tokens: The tokens of its prompt.
        submitted_s: When it was submitted to the engine; None before.
        wanted_s: By when its client wants it, on the monitor's clock; None without a deadline.
        wait_s: How long it was predicted to wait when it came; None before anything was measured.
        expected_s: When its first token was expected as it came, in monotonic seconds; None where that was no question.
        first_s: How long after its submission its first token was there; None before.
        prediction: The last prediction of its first token; None before anything was measured.
        http_id: The `X-Request-Id` of its answer.
        request_id: The id of its first prompt in the engine, once it is submitted.
        is_recorded: Whether its answer is kept, and sent to its readers from there.
    """

    num_tokens: int
    tenant: str
    num_bytes: int | None
    num_prompt_tokens: int = 0
    submitted_s: float | None = None
    wanted_s: float | None = None
    wait_s: float | None = None
    expected_s: float | None = None
    first_s: float | None = None
    prediction: FirstToken | None = None
    http_id: str = ""
    request_id: str = ""
    is_recorded: bool = False


class Lateness:
    """The margin between predictions and a limit, with which first tokens come within the limit.

    Nineteen of twenty come no later than expected and this. It grows fast and shrinks slowly: too much of it makes the
    queue shorter than it might be, which costs nothing while any request waits.

    Requests that wait to be read are a queue, too, and each accepted one makes it longer. It is kept below a
    twentieth of the limit, at least 0.1 s, since refusals wait in it as well: at that mean, none of those that waited
    so long themselves is accepted.

    Attributes:
        unread_s: The mean time that the headers of the last requests have waited to be read.
    """

    def __init__(self) -> None:
        self._late_share = _FIRST_ALLOWANCE
        self.unread_s = 0.0

    def allowance_s(self, limit_s: float, passed_s: float) -> float:
        """The margin below a limit, in seconds, for a request whose headers have waited `passed_s`."""
        max_unread_s = max(_MAX_UNREAD * limit_s, _LEAST_MAX_UNREAD_S)
        return (self._late_share + min(self.unread_s, passed_s) / max_unread_s) * limit_s

    def observe(self, late_s: float, limit_s: float) -> None:
        """Learns from a first token that came `late_s` after its prediction."""
        is_late = late_s > self._late_share * limit_s
        self._late_share += _ALLOWANCE_STEP * (_IN_TIME_SHARE if is_late else _IN_TIME_SHARE - 1.0)
        self._late_share = min(max(self._late_share, 0.0), _MAX_ALLOWANCE)

    def observe_unread(self, seconds: float) -> None:
        """Notes how long the headers of a request have waited to be read."""
        self.unread_s += _SMOOTHING * (seconds - self.unread_s)
        if self.unread_s < _MIN_UNREAD_S:
            self.unread_s = 0.0


class FirstTokens:
    """Predicts the first tokens of requests, from the reports of all engine cores.

    Attributes:
        overhead_s: Seconds until the first token beyond those of the steps: the mean of observed ones.
        is_calibrated: Whether enough steps were measured.
        is_blocked: Whether requests wait for blocks, or for places of which nothing is known, and not for earlier
            prompts.
        progress: Gives the first completions in flight, in their order; None where that is not known.
        queued: Requests that were submitted here and have neither a first token nor ended, in this order.
        num_waiting: Requests that wait in all engine cores, by their last reports.
        num_running: Those that run.
    """

    def __init__(self, limits: StepLimits, quantum: int, *, has_deadlines: bool = False) -> None:
        """`quantum` as in `QueueState`; `has_deadlines`: Requests of one tenant go by their deadlines."""
        self.overhead_s = 0.0
        self.is_calibrated = self.is_blocked = False
        self.num_waiting = self.num_running = 0
        self.progress: Callable[[int], Sequence[RequestProgress]] | None = None
        self._is_corrected = False
        self._limits = limits
        self._quantum = quantum
        self._has_deadlines = has_deadlines
        self._block_size = 16
        self._engines: dict[int, EnginePredictor] = {}
        self._step_begins: dict[int, float] = {}
        self.queued: dict[int, PendingRequest] = {}

    def log_engine_initialized(self, ready: EngineReady, max_num_step_tokens: int) -> None:
        """Notes the sizes of the engine cores; one that was replaced is measured again."""
        self._block_size = ready.block_size
        max_num_rows = ready.max_num_rows or self._limits.max_num_rows
        self._limits = self._limits._replace(max_num_tokens=max_num_step_tokens, max_num_rows=max_num_rows)
        self._engines.pop(ready.engine_index, None)

    def observe(self, stats: SchedulerStats, iteration: IterationStats, now_s: float) -> None:
        """Processes the report of an engine core after a step."""
        index, self._is_corrected = iteration.engine_index, False
        engine = self._engines.get(index)
        if engine is None:
            engine = self._engines[index] = EnginePredictor(self._limits, self._block_size)
        end_s = iteration.timestamp_s if 0 <= now_s - iteration.timestamp_s < _MAX_REPORT_AGE_S else now_s
        work_s = None if iteration.phases is None else sum(iteration.phases)
        engine.observe(stats, end_s, work_s)
        self._step_begins[index] = end_s - (work_s or 0.0)
        for finished in iteration.finished_requests:
            engine.answer_lengths.observe(finished.num_generation_tokens, is_stopped=finished.finish_reason != "length")
        if not self.is_calibrated:
            self.is_calibrated = engine.costs.model() is not None
        self.num_running = stats.num_running
        if stats.num_waiting or self.num_waiting or len(self._engines) > 1:
            self._note_waiting(max(stats.num_scheduled_rows, stats.num_running))

    def predict(
        self, num_prompt_tokens: int, num_tokens: int, tenant: str, wanted_s: float | None, now_s: float
    ) -> FirstToken | None:
        """The first token of a request that comes now; None before enough steps were measured.

        `num_prompt_tokens`: The tokens of its prompt.
        `num_tokens`: Its tokens in a fair queue.
        `wanted_s`: Its deadline, if it has one.
        """
        if not self._engines:
            return None
        index, engine = min(self._engines.items(), key=lambda item: item[1].load.num_running + item[1].load.num_waiting)
        before = QueuedTokens(coming_s=now_s)
        if self.queued or engine.load.num_waiting:
            before = self._before(index, engine, num_tokens, tenant, wanted_s, now_s)
        num_new_tokens = max(round(num_prompt_tokens * (1.0 - engine.found_share)), 1)
        # Places are taken in the order of arrival, where there is one queue.
        progress = self.progress if not self._quantum and len(self._engines) == 1 else None
        prediction = engine.predict(before, num_new_tokens, now_s, progress, len(self.queued))
        if prediction is None:
            return None
        return FirstToken(prediction.wait_s, prediction.ttft_s + self.overhead_s)

    def own_seconds(self, num_prompt_tokens: int, now_s: float) -> float:
        """Seconds from the end of a wait to the first token of such a prompt; 0 before enough steps were measured."""
        engine = next(iter(self._engines.values()), None)
        if engine is None:
            return 0.0
        num_new_tokens = max(round(num_prompt_tokens * (1.0 - engine.found_share)), 1)
        prediction = engine.predict(QueuedTokens(coming_s=now_s), num_new_tokens, now_s)
        return 0.0 if prediction is None else prediction.ttft_s - prediction.wait_s + self.overhead_s

    def submit(self, request: PendingRequest, now_s: float, params: SamplingParams | None = None) -> None:
        """Notes a request that goes to the engine now; `params`: What it asks for."""
        self.queued[id(request)] = request
        for engine in self._engines.values():
            if engine.known_places is not None and params is not None:
                engine.known_places.add(RequestProgress.of(request.num_prompt_tokens, 0, params))
            engine.note_arrival(request.num_prompt_tokens // len(self._engines), now_s)

    def note_first(self, request: PendingRequest, real_s: float) -> None:
        """The first token of a request is there, so long after it was submitted.

        Requests whose first tokens come from one step have one cause of their errors, so that it counts once.
        """
        self.queued.pop(id(request), None)
        request.first_s = real_s
        if request.prediction is not None and not self._is_corrected:
            self._is_corrected = True
            error_s = real_s - request.prediction.ttft_s
            correction_s = min(max(error_s, -_MAX_CORRECTION_S), _MAX_CORRECTION_S)
            self.overhead_s = min(max(self.overhead_s + _SMOOTHING * correction_s, 0.0), _MAX_OVERHEAD_S)

    def _note_waiting(self, num_rows: int) -> None:
        """Notes who waits, and for what; `num_rows`: Requests in the last step."""
        loads, max_num_rows = [engine.load for engine in self._engines.values()], self._limits.max_num_rows
        self.num_waiting = sum([load.num_waiting for load in loads])
        self.num_running = sum([load.num_running for load in loads])
        if self._knows_places and num_rows >= max_num_rows:
            self.is_blocked = False
            return
        self.is_blocked = any(
            load.num_waiting and (load.num_running >= max_num_rows or not load.num_prefill_tokens) for load in loads
        )

    @property
    def _knows_places(self) -> bool:
        """Whether requests have places in the order of their arrival, which the lengths of those before tell."""
        return self.progress is not None and not self._quantum and len(self._engines) == 1

    def _before(
        self, index: int, engine: EnginePredictor, num_tokens: int, tenant: str, wanted_s: float | None, now_s: float
    ) -> QueuedTokens:
        """The tokens that are queued before the request, as submitted here and as reported.

        Of several engine cores each gets its part of what was submitted.
        """
        load, known_s = engine.load, self._step_begins[index]
        num_engines, kept_share = len(self._engines), 1.0 - engine.found_share
        num_reported = load.num_waiting * num_engines
        latest_s = now_s + IMPLIED_DEADLINE_S if wanted_s is None else wanted_s
        waiting, coming = defaultdict[str, int](int), defaultdict[str, int](int)
        num_own_later = num_requests = 0
        coming_s = now_s
        for request in islice(reversed(self.queued.values()), MAX_NUM_COUNTED):
            submitted_s = request.submitted_s or now_s
            if submitted_s <= known_s:
                if not num_reported:
                    break  # it runs
                num_reported -= 1
            num_new_tokens = round(request.num_prompt_tokens * kept_share)
            is_later = self._has_deadlines and request.tenant == tenant and _wanted_s(request, submitted_s) > latest_s
            if is_later:
                num_own_later += num_new_tokens if submitted_s <= load.end_s else 0
                continue
            num_requests += 1
            if submitted_s > load.end_s:
                coming[request.tenant] += num_new_tokens
                coming_s = submitted_s
            else:
                waiting[request.tenant] += num_new_tokens
        num_known = sum(waiting.values()) + num_own_later
        num_foreign = max(load.num_waiting_tokens * num_engines - num_known, 0) if num_reported else 0
        num_requests += num_reported if num_foreign else 0
        if not self._quantum:
            num_waiting, num_coming = sum(waiting.values()) + num_foreign, sum(coming.values())
        else:
            share = waiting[tenant] + coming[tenant] + num_tokens + self._quantum
            num_waiting = _within(waiting, tenant, share) + num_foreign
            num_coming = _within(coming, tenant, share)
        num_others = max(num_known + num_foreign - num_waiting, 0)
        return QueuedTokens(
            num_waiting // num_engines, num_coming // num_engines, num_requests // num_engines,
            num_others // num_engines, coming_s,
        )  # fmt: skip


def _wanted_s(request: PendingRequest, submitted_s: float) -> float:
    return submitted_s + IMPLIED_DEADLINE_S if request.wanted_s is None else request.wanted_s


def _within(tenant_to_tokens: Mapping[str, int], tenant: str, share: int) -> int:
    """The tokens of a tenant, and those of each other one up to a share."""
    return sum(number if name == tenant else min(number, share) for name, number in tenant_to_tokens.items())
