"""The requests of a recorded run: when they came, what they got, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llmstack_engine_client.prediction.cost_model import StepWork, step_work
from llmstack_engine_core.admission import AUDIT_MARK, BEAM_MARK
from llmstack_step_log import RecordedRun
from llmstack_step_log.decisions import (
    REFUSED,
    SCHEDULED,
    UPDATED,
    scheduled_rows,
    unpack_decision,
    updated_rows,
)
from llmstack_step_log.primitives import MICROSECONDS
from llmstack_step_log.records import Event, NumericsChanged, RequestAdded, RequestsAborted, StepScheduled, StepUpdated
from llmstack_step_log.replay.derive import Decision, derive_decisions
from llmstack_types import EngineCoreRequest

# Another machine has another clock: an arrival that lies further away from the next step is not on this one.
MAX_ARRIVAL_AGE_S: Final = 600.0


@dataclass(slots=True)
class Outcome:
    """The times and tokens of one request, in seconds since its arrival.

    Attributes:
        queue_s: Until its first step; None where it had none.
        ttft_s: Until its first token, or its vector; None where it had neither.
        e2e_s: Until its end.
        num_tokens: The number of tokens of its answer.
        num_preemptions: How often it lost its row.
    """

    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float = 0.0
    num_tokens: int = 0
    num_preemptions: int = 0

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first one."""
        if self.ttft_s is None or self.num_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class RecordedRequest:
    """One request of the run.

    Attributes:
        arrival_s: When it came, on the clock of the run.
        number: In the order in which the scheduler got them.
        token_ids: The tokens of its answer.
        is_cut: Whether its client, a stop string, an error or the end of the log ended it.
        numerics: What its results depend on, where that is not `LogHeader.numerics`: the weights had been changed.
    """

    request: EngineCoreRequest
    arrival_s: float
    number: int = 0
    token_ids: list[int] = field(default_factory=list)
    is_cut: bool = False
    outcome: Outcome = field(default_factory=Outcome)
    numerics: Mapping[str, Any] | None = None

    @property
    def end_s(self) -> float:
        """When it ended, on the clock of the run."""
        return self.arrival_s + self.outcome.e2e_s


class RunCollector:
    """Puts the events and the decisions of a run together, in their order.

    Beams are left out: what is forked depends on the order of the steps.

    Attributes:
        live: The requests that have come and not ended, in the order of their arrival in the scheduler.
        now_s: The time of the last event that has one.
        num_left_out: Beams.
        num_refused: Requests that the scheduler refused.
        num_unknown_rows: Rows of the last step whose requests came before the first event; beams apart.
    """

    def __init__(
        self,
        on_end: Callable[[RecordedRequest], None],
        on_step: Callable[[StepWork, float], None] = lambda work, seconds: None,
    ) -> None:
        """`on_end` receives each request that has ended, `on_step` each measured step and its seconds."""
        self.live: dict[str, RecordedRequest] = {}
        self.now_s = 0.0
        self.num_left_out = self.num_refused = self.num_unknown_rows = 0
        self._on_end = on_end
        self._on_step = on_step
        self._unseen: list[RecordedRequest] = []  # added since the last step: their time is not known yet
        self._under_way: deque[tuple[float, StepWork]] = deque()
        self._numerics: Mapping[str, Any] | None = None
        self._unmeasured: tuple[float, StepWork] | None = None
        self._updated_s = 0.0
        self._lag = self._num_added = 0

    def take_event(self, event: Event) -> None:
        """Takes in the next event; the decision that follows from it comes after it."""
        match event:
            case RequestAdded(request):
                self._add(request)
            case NumericsChanged(numerics):
                self._numerics = numerics
            case StepScheduled(now_us):
                self.now_s = now_us / MICROSECONDS
                self._date_arrivals()
            case StepUpdated(now_us, lag):
                self.now_s, self._lag = now_us / MICROSECONDS, lag
            case RequestsAborted(request_ids):
                for request_id in request_ids:
                    self._cut(request_id)

    def take_decision(self, packed: bytes) -> None:
        """Takes in what was decided on the last event."""
        kind, decided = unpack_decision(packed)
        if kind == SCHEDULED:
            self._take_scheduled(decided)
        elif kind == UPDATED:
            self._take_updated(decided)
        elif kind == REFUSED and self.live.pop(str(decided), None) is not None:
            self.num_refused += 1

    def close(self) -> None:
        """Ends what the run has not ended."""
        self._date_arrivals()
        for request_id in list(self.live):
            self._cut(request_id)

    def _add(self, request: EngineCoreRequest) -> None:
        if request.request_id.startswith(AUDIT_MARK):  # it has no answer
            return
        if BEAM_MARK in request.request_id or request.sampling_params.use_beam_search:
            self.num_left_out += 1
        elif request.request_id not in self.live:  # a second one of that id is refused
            self._num_added += 1
            recorded = RecordedRequest(request, self.now_s, self._num_added, numerics=self._numerics)
            self.live[request.request_id] = recorded
            self._unseen.append(recorded)

    def _date_arrivals(self) -> None:
        """The step that begins now is the first one that can have the requests that came before it."""
        for recorded in self._unseen:
            arrival_s = recorded.request.arrival_time_s
            recorded.arrival_s = arrival_s if 0.0 <= self.now_s - arrival_s <= MAX_ARRIVAL_AGE_S else self.now_s
        self._unseen.clear()

    def _take_scheduled(self, decided: dict[str, Any]) -> None:
        if self._unmeasured is not None:
            began_s, work = self._unmeasured
            self._measure(work, self.now_s - began_s)
        self._unmeasured = None
        for request_id in decided.get("removed_request_ids", ()):
            if request_id in self.live:  # it has not ended
                self.live[request_id].outcome.num_preemptions += 1
        rows = scheduled_rows(decided)
        self.num_unknown_rows = 0
        for request_id, *_ in rows:
            recorded = self.live.get(request_id)
            if recorded is None:
                self.num_unknown_rows += BEAM_MARK not in request_id
            elif recorded.outcome.queue_s is None:
                recorded.outcome.queue_s = self.now_s - recorded.arrival_s
        self._under_way.append((self.now_s, step_work(rows)))

    def _take_updated(self, decided: dict[str, Any]) -> None:
        for request_id, named in updated_rows(decided).items():
            recorded = self.live.get(request_id)
            if recorded is None:
                continue
            outcome, reason = recorded.outcome, named.get("finish_reason")
            recorded.token_ids += named["new_token_ids"]
            outcome.num_tokens = len(recorded.token_ids)
            outcome.e2e_s = self.now_s - recorded.arrival_s
            if outcome.ttft_s is None and reason != "error":
                outcome.ttft_s = outcome.e2e_s
            if reason is not None:
                recorded.is_cut = reason == "error"
                self._end(request_id)
        if self._under_way:
            self._close_step(*self._under_way.popleft())
        self._updated_s = self.now_s

    def _close_step(self, began_s: float, work: StepWork) -> None:
        """A step lasts until the next one, if there is work; that includes what is done between two steps."""
        if self._lag:
            self._measure(work, self.now_s - max(began_s, self._updated_s))
        elif self.live:
            self._unmeasured = began_s, work
        else:
            self._measure(work, self.now_s - began_s)

    def _measure(self, work: StepWork, seconds: float) -> None:
        if seconds > 0 and (work.num_prefill_tokens or work.num_decode_rows):
            self._on_step(work, seconds)

    def _cut(self, request_id: str) -> None:
        recorded = self.live.get(request_id)
        if recorded is not None:
            recorded.is_cut = True
            recorded.outcome.e2e_s = max(self.now_s - recorded.arrival_s, 0.0)
            self._end(request_id)

    def _end(self, request_id: str) -> None:
        self._on_end(self.live.pop(request_id))


@dataclass(slots=True)
class RecordedRequests:
    """The requests and steps of a whole log.

    Attributes:
        requests: By arrival.
        steps: The tokens of each step, and its seconds.
    """

    requests: list[RecordedRequest]
    steps: list[tuple[StepWork, float]]
    num_left_out: int
    num_refused: int


def requests_of_log(run: RecordedRun) -> RecordedRequests:
    """All requests of a run.

    Raises:
        StepLogError: The log cannot be replayed.
    """
    requests: list[RecordedRequest] = []
    steps: list[tuple[StepWork, float]] = []
    collector = RunCollector(requests.append, lambda work, seconds: steps.append((work, seconds)))

    def events() -> Iterator[Event]:
        for event in run.events():
            collector.take_event(event)
            yield event

    for item in derive_decisions(events(), run.header.build_scheduler()):
        if isinstance(item, Decision):
            collector.take_decision(item.packed)
    collector.close()
    requests.sort(key=lambda one: (one.arrival_s, one.number))
    return RecordedRequests(requests, steps, collector.num_left_out, collector.num_refused)
