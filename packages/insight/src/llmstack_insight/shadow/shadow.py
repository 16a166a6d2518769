"""The comparison of a live run with what another control plane would do."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from llmstack_engine_client.prediction.cost_model import CostModel, StepWork
from llmstack_engine_client.prediction.step_costs import StepCosts
from llmstack_insight.rerun import ControlPlane, Outcome, RecordedRequest, Rerun, RunCollector
from llmstack_step_log.decisions import REFUSED, unpack_decision
from llmstack_step_log.encoding import EventDecoder
from llmstack_step_log.primitives import Cursor
from llmstack_step_log.records import (
    Checkpoint,
    PrefixCacheReset,
    PrefixImported,
    RequestAdded,
    RequestForked,
    SessionsReleased,
    StepScheduled,
    StepUpdated,
)
from llmstack_types import ShadowFigures, ShadowReport

# Requests run in the shadow once their answers are known; a longer one counts as ended after so long.
MAX_HOLD_S: Final = 60.0
MAX_PENDING: Final = 8192
MAX_PENDING_TOKENS: Final = 1 << 24
MAX_RECENT: Final = 256
# After a thousand steps a duration counts a third.
_KEPT: Final = 0.999
_HAS_DECISION: Final = (
    StepScheduled, StepUpdated, RequestForked, PrefixCacheReset, SessionsReleased, PrefixImported,
)  # fmt: skip

_Compared = tuple[Outcome, Outcome, Outcome]


class _LiveCosts:
    """The cost model of the steps so far, scaled to keep their sum."""

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._model: CostModel | None = None
        self._real_s = self._fitted_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether enough was measured."""
        return self._model is not None

    def observe(self, work: StepWork, seconds: float) -> None:
        """Adds a measured step."""
        self.costs.observe(work, seconds)
        self._model = self.costs.model()
        if self._model is not None:
            self._real_s = self._real_s * _KEPT + seconds
            self._fitted_s = self._fitted_s * _KEPT + self._model.step_s(work)

    def step_s(self, work: StepWork) -> float:
        """Seconds of a step."""
        if self._model is None or not self._fitted_s:
            return 0.0
        return self._model.step_s(work) * self._real_s / self._fitted_s


class Shadow:
    """Follows a run, and runs each request again under two control planes: the run's own, and the other one."""

    def __init__(self, name: str, plane: ControlPlane, other: ControlPlane) -> None:
        self._name = name
        self._planes = (plane, other)
        self._costs = _LiveCosts()
        self._collector = RunCollector(self._end, self._costs.observe)
        self._pending: list[tuple[float, int, RecordedRequest]] = []  # a heap of requests whose answers are known
        self._num_pending_tokens = 0
        self._handed: set[int] = set()  # numbers of requests that run for too long
        self._reruns: tuple[Rerun, Rerun] | None = None
        self._outcomes: dict[int, dict[int, Outcome | None]] = {}  # by number of the request, then by plane
        self._from_s = self._compared_from_s = 0.0
        self._num_shed = self._num_requests = 0
        self._has_restarted = False
        self._sums = (ShadowFigures(), ShadowFigures(), ShadowFigures())
        self._recent: deque[_Compared] = deque(maxlen=MAX_RECENT)

    def take(self, segment: bytes, decisions: list[bytes], start_us: int) -> None:
        """Follows a segment of the log.

        Raises:
            StepLogError: It cannot be read.
        """
        decoder, cursor = EventDecoder(start_us), Cursor(segment)
        left = deque(decisions)
        while not cursor.is_at_end:
            tag = cursor.take(1)[0]
            event = decoder.decode(tag, cursor.take(cursor.take_uint()))
            if isinstance(event, Checkpoint):
                continue
            self._collector.take_event(event)
            is_refused = isinstance(event, RequestAdded) and bool(left) and _refuses(left[0], event)
            if left and (is_refused or isinstance(event, _HAS_DECISION)):
                self._collector.take_decision(left.popleft())
        if self._collector.num_unknown_rows:  # the load of these is missing in the shadow
            self._compared_from_s = self._collector.now_s

    def skip(self, num_steps: int) -> None:
        """Steps that were not followed: all that is known of requests is out of date."""
        live = len(self._collector.live)
        self._collector = RunCollector(self._end, self._costs.observe)
        self._restart(num_steps + live)

    def note_shed(self, num_steps: int) -> None:
        """Counts steps that are not followed."""
        self._num_shed += num_steps

    def work(self, has_time: Callable[[], bool], idle_s: float = 0.0) -> bool:
        """Runs what is known again, while there is time; whether the time was too short.

        `idle_s`: Where no request is live, none came before that.

        Raises:
            SimulationError: A control plane makes no progress.
        """
        if not self._costs.is_ready:
            return False
        self._hand_over_long()
        if len(self._pending) > MAX_PENDING or self._num_pending_tokens > MAX_PENDING_TOKENS:
            self._restart(len(self._pending))
        reruns = self._reruns
        if reruns is None:
            reruns = self._reruns = self._make_reruns()
        known_s = self._known_s(idle_s)
        self._submit(reruns, known_s)
        has_more = True
        while has_more and has_time():
            behind = min(reruns, key=lambda one: one.now_s)
            ahead = reruns[reruns[0] is behind]
            has_more = behind.advance(known_s) or ahead.advance(known_s)
        for index, one in enumerate(reruns):
            self._note(index, one)
        if max(one.num_unfinished for one in reruns) > MAX_PENDING:
            self._restart(len(self._pending))
        return has_more

    @property
    def behind_s(self) -> float:
        """The time that the slower plane is behind the known inputs."""
        known_s = self._known_s(0.0)
        busy = [one.now_s for one in self._reruns or () if one.num_unfinished]
        waiting = [self._pending[0][0]] if self._pending and self._reruns is not None else []
        return max(known_s - min([*busy, *waiting], default=known_s), 0.0)

    @property
    def lag_s(self) -> float:
        """The time that the slower plane is behind the run, where it has work."""
        reruns = self._reruns
        if reruns is None:
            return 0.0
        busy = [one.now_s for one in reruns if one.num_unfinished]
        waiting = [self._pending[0][0]] if self._pending else []
        return max(self._collector.now_s - min([*busy, *waiting], default=self._collector.now_s), 0.0)

    def report(self, cpu_s: float) -> ShadowReport:
        """The report on the requests so far."""
        recent = [_sums([compared[index] for compared in self._recent]) for index in range(3)]
        return ShadowReport(
            self._name, "", self._num_requests, self._num_shed, self.lag_s, cpu_s, len(self._recent),
            *self._sums, *recent,
        )  # fmt: skip

    def _make_reruns(self) -> tuple[Rerun, Rerun]:
        self._from_s = self._collector.now_s if self._has_restarted else 0.0
        one, other = (Rerun(plane.build(), self._costs, self._from_s) for plane in self._planes)
        return one, other

    def _restart(self, num_shed: int) -> None:
        """Drops what is to be run again, and begins again with the requests that come from now on."""
        self._has_restarted = True
        self._num_shed += num_shed
        self._pending.clear()
        self._num_pending_tokens = 0
        self._outcomes.clear()
        self._handed.clear()
        self._reruns = None
        self._compared_from_s = self._collector.now_s

    def _end(self, recorded: RecordedRequest) -> None:
        if recorded.number in self._handed:
            self._handed.discard(recorded.number)
            return
        if recorded.arrival_s < self._from_s:  # its load was missing when it began
            self._compared_from_s = max(self._compared_from_s, recorded.end_s)
            return
        heapq.heappush(self._pending, (recorded.arrival_s, recorded.number, recorded))
        self._num_pending_tokens += len(recorded.token_ids) + len(recorded.request.prompt_token_ids)

    def _hand_over_long(self) -> None:
        now_s = self._collector.now_s
        for recorded in self._collector.live.values():
            if now_s - recorded.arrival_s < MAX_HOLD_S:
                break  # later ones came later
            if recorded.number not in self._handed and recorded.arrival_s >= self._from_s:
                outcome = replace(recorded.outcome, e2e_s=now_s - recorded.arrival_s)
                copied = replace(recorded, token_ids=list(recorded.token_ids), is_cut=True, outcome=outcome)
                self._end(copied)
                self._handed.add(recorded.number)

    def _known_s(self, idle_s: float) -> float:
        """Up to when all requests are known that have come."""
        waited = [one.arrival_s for one in self._collector.live.values() if one.number not in self._handed]
        return min(waited, default=max(self._collector.now_s, idle_s))

    def _submit(self, reruns: tuple[Rerun, Rerun], known_s: float) -> None:
        while self._pending and self._pending[0][0] <= known_s:
            recorded = heapq.heappop(self._pending)[2]
            self._num_pending_tokens -= len(recorded.token_ids) + len(recorded.request.prompt_token_ids)
            self._outcomes[recorded.number] = {}
            for one in reruns:
                one.submit(recorded)

    def _note(self, index: int, rerun: Rerun) -> None:
        for recorded, outcome in rerun.take_ended():
            found = self._outcomes[recorded.number]
            found[index] = outcome
            if len(found) == len(self._planes):
                del self._outcomes[recorded.number]
                self._compare(recorded, found[0], found[1])

    def _compare(self, recorded: RecordedRequest, unchanged: Outcome | None, other: Outcome | None) -> None:
        real = recorded.outcome
        is_whole = real.ttft_s is not None and recorded.number not in self._handed
        if not is_whole or unchanged is None or other is None or recorded.arrival_s < self._compared_from_s:
            return
        compared = real, unchanged, other
        self._num_requests += 1
        self._recent.append(compared)
        one, two, three = (_plus(total, _sums([outcome])) for total, outcome in zip(self._sums, compared, strict=True))
        self._sums = one, two, three


def _plus(one: ShadowFigures, other: ShadowFigures) -> ShadowFigures:
    return ShadowFigures(
        one.ttft_s + other.ttft_s,
        one.queue_s + other.queue_s,
        one.e2e_s + other.e2e_s,
        one.num_preemptions + other.num_preemptions,
    )


def _sums(outcomes: list[Outcome]) -> ShadowFigures:
    return ShadowFigures(
        sum(one.ttft_s or 0.0 for one in outcomes),
        sum(one.queue_s or 0.0 for one in outcomes),
        sum(one.e2e_s for one in outcomes),
        sum(one.num_preemptions for one in outcomes),
    )


def _refuses(packed: bytes, event: RequestAdded) -> bool:
    kind, decided = unpack_decision(packed)
    return kind == REFUSED and decided == event.request.request_id
