"""The steps of a log as a recorder would have kept them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmstack_engine_core.events import note_of
from llmstack_step_log import Run
from llmstack_step_log.control_plane import build_scheduler
from llmstack_step_log.decisions import SCHEDULED, UPDATED, encoder_parts, media_numbers, scheduled_rows
from llmstack_step_log.packing import unpack
from llmstack_step_log.primitives import MICROSECONDS
from llmstack_step_log.records import Event, RequestAdded, RequestForked
from llmstack_step_log.replay.derive import Decision, DecisionsDifferError, derive_decisions, proven
from llmstack_step_log.scheduler_protocol import Scheduler
from llmstack_types import (
    EngineCoreRequest,
    MediaItem,
    RequestEvent,
    RequestNote,
    RequestStatus,
    ScheduledRequest,
    SchedulerStats,
    StepPhases,
    StepRecord,
    StepRecording,
)

MAX_EVENTS = 200_000
# A cost model is fitted to the steps before a request, too.
STEPS_BEFORE = 512
# A request that arrived so long before the last messages were read, and was not added then, was held.
HELD_S = 0.005
# More is the clock of another machine.
MOST_HELD_S = 600.0
_NO_TIME = StepPhases(0.0, 0.0, 0.0)


def steps_of_log(run: Run, max_steps: int, is_around: Callable[[str], bool] | None = None) -> StepRecording:
    """The last `max_steps` steps of a run with rows, and the states that requests entered meanwhile.

    A step lasts until its results came, from its schedule or from the results before, since steps may be scheduled
    before those; a log has no times of its parts.

    `is_around`: The run is read no further than needed for these requests: until they have ended, and for half as many
    steps again. The steps since they came are kept, up to `max_steps` of them, and `STEPS_BEFORE` before.

    Raises:
        DecisionsDifferError: These packages decide otherwise than those of the run, which the text names.
        StepLogError: The log cannot be replayed.
    """
    reading = _Reading(max_steps, is_around, len(run.start.state.under_way) if run.start is not None else 0)
    if run.start is None:
        scheduler = build_scheduler(*run.header.configs(), reading.note_status)
    else:
        reading.go_on(run.start.state.arrivals)
        scheduler = run.start.build_scheduler(run.header, reading.note_status)
    try:
        for item in proven(derive_decisions(reading.arrivals(run.events()), scheduler, run.start), run.start):
            if not reading.take(item, scheduler):
                break
    except DecisionsDifferError as error:
        raise DecisionsDifferError(f"{error}; it was made by {run.header.made_by}") from error
    return reading.kept()


class _Reading:
    """The state of a run while it is read."""

    def __init__(self, max_steps: int, is_around: Callable[[str], bool] | None, num_under_way: int) -> None:
        self._max_steps = max_steps
        self._is_around = is_around
        self._steps: deque[StepRecord] = deque()
        self._num_dropped = self._num_kept = 0
        self._events: deque[RequestEvent] = deque(maxlen=MAX_EVENTS)
        self._statuses: list[tuple[str, RequestStatus]] = []
        # Results come in the order of the steps; those of steps before the beginning are not kept.
        self._under_way: deque[int | None] = deque([None] * num_under_way)
        self._now_s = self._last_result_s = 0.0
        self._arrivals: dict[str, EngineCoreRequest] = {}
        self._notes: dict[str, RequestNote] = {}
        self._media: dict[str, Sequence[MediaItem]] = {}
        self._begun_s = math.inf  # before the first step: each request may have come before the engine core began
        self._received_s: float | None = None  # messages were read last; None: there was nothing else to do
        self._come: dict[str, int] = {}
        self._open: set[str] = set()
        self._until: int | None = None

    def go_on(self, requests: Iterable[EngineCoreRequest]) -> None:
        """The log begins with a snapshot that has these requests."""
        self._begun_s = 0.0
        for request in requests:
            self._note(request)

    def arrivals(self, events: Iterator[Event]) -> Iterator[Event]:
        """Notes on the way when requests came, on the clock of their senders."""
        for event in events:
            if isinstance(event, RequestAdded):
                self._arrivals[event.request.request_id] = event.request
                self._note(event.request)
            elif isinstance(event, RequestForked):
                self._note(event.request)
            yield event

    def note_status(self, request_id: str, status: RequestStatus) -> None:
        """A request entered a state."""
        self._statuses.append((request_id, status))

    def take(self, item: Decision, scheduler: Scheduler) -> bool:
        """Takes in a decision; False once no more is needed."""
        self._now_s = item.now_us / MICROSECONDS
        for request_id, status in self._statuses:
            arrival = self._arrivals.pop(request_id, None) if status is RequestStatus.WAITING else None
            if arrival is None:
                self._events.append(RequestEvent(request_id, status, self._now_s))
            else:
                self._events += self._arrival(arrival)
            if self._is_around is not None and self._is_around(request_id):
                self._follow(request_id, is_over=status.value.startswith("finished"))
        self._statuses.clear()
        for one in scheduler.take_returns():
            self._notes[one.request_id] = self._notes.get(one.request_id, RequestNote())._replace(went_on=one)
        kind, decided = unpack(item.packed, list)
        if kind == SCHEDULED:
            self._begun_s = min(self._begun_s, self._now_s)
            self._schedule(decided, scheduler.stats())
            self._received_s = self._now_s
        elif kind == UPDATED and self._under_way:
            self._update(self._under_way.popleft())
            if not (self._under_way or scheduler.has_unfinished_requests()):
                self._received_s = None
        return self._until is None or self._num_kept < self._until

    def _note(self, request: EngineCoreRequest) -> None:
        if request.media:
            self._media[request.request_id] = request.media
        note = note_of(request, self._begun_s)
        if any(note):
            self._notes[request.request_id] = note

    def _arrival(self, request: EngineCoreRequest) -> list[RequestEvent]:
        """The states of a request that is queued: a log has no others, so that times say whether it was held before."""
        name, arrival_s, now_s = request.request_id, request.arrival_time_s, self._now_s
        received_s = now_s if self._received_s is None else self._received_s
        is_known = 0 <= now_s - arrival_s <= MOST_HELD_S and not request.output_token_ids
        gate = None
        if is_known and request.sampling_params.structured_outputs is not None:
            gate = RequestStatus.WAITING_FOR_GRAMMAR
        elif is_known and request.lora_name is not None and received_s - arrival_s > HELD_S:
            gate = RequestStatus.WAITING_FOR_ADAPTER
        if gate is not None:
            return [RequestEvent(name, gate, arrival_s), RequestEvent(name, RequestStatus.WAITING, now_s)]
        # As `EngineCore` says it: the last step may have delayed it.
        came_s = min(max(arrival_s, received_s), now_s) if arrival_s else now_s
        return [RequestEvent(name, RequestStatus.WAITING, came_s)]

    def _follow(self, request_id: str, is_over: bool) -> None:
        first = self._come.setdefault(request_id, self._num_kept)
        self._open.add(request_id)
        if is_over:
            self._open.discard(request_id)
        self._until = None if self._open else self._num_kept + max(1, (self._num_kept - first) // 2)

    def _schedule(self, decided: Mapping[str, Any], stats: SchedulerStats) -> None:
        rows, work = scheduled_rows(decided), encoder_parts(decided)
        if not rows and not work:
            self._under_way.append(None)
            return
        scheduled = [
            ScheduledRequest(name, computed, num_tokens, block_ids or [], draft_ids or [])
            for name, computed, num_tokens, block_ids, draft_ids in rows
        ]
        self._under_way.append(self._num_kept)
        self._num_kept += 1
        media = {
            name: tuple(zip(numbers, self._media.get(name, ()), strict=False))
            for name, numbers in media_numbers(decided).items()
        }
        self._steps.append(StepRecord(self._now_s, _NO_TIME, stats, scheduled, work, media))
        is_before = self._is_around is not None and not self._come
        while len(self._steps) > (min(STEPS_BEFORE, self._max_steps) if is_before else self._max_steps):
            self._steps.popleft()
            self._num_dropped += 1

    def _update(self, number: int | None) -> None:
        if number is not None and number >= self._num_dropped:
            record = self._steps[number - self._num_dropped]
            start_s = max(record.start_s, self._last_result_s)
            phases = StepPhases(0.0, self._now_s - start_s, 0.0)
            self._steps[number - self._num_dropped] = record._replace(start_s=start_s, phases=phases)
        self._last_result_s = self._now_s

    def kept(self) -> StepRecording:
        """The steps and events so far; the events before the first step only where no step is left out."""
        steps = list(self._steps)
        first_s = steps[0].start_s if steps and self._num_dropped else -math.inf
        events = [event for event in self._events if event.time_s >= first_s]
        return StepRecording(self._now_s, steps, events, notes=self._notes)
