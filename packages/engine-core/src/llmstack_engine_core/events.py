"""Event hooks, and the recorder of the last steps."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from llmstack_engine_core.admission import BEAM_MARK
from llmstack_engine_core.protocols import EventHook
from llmstack_engine_core.row_columns import RowColumns
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestEvent,
    RequestNote,
    RequestStatus,
    SchedulerOutput,
    SessionReturn,
    StepRecord,
    StepRecording,
)

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

# The states that the front end receives: a request that ends has an output that says so.
_REPORTED_STATES = frozenset((
    RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.YIELDED,
))  # fmt: skip


class EventBus:
    """Collects the states that requests enter, and calls the hooks. Used by the engine core's thread.

    `on_status` is what the scheduler calls; it reads the clock, which the scheduler may not.

    Attributes:
        clock: The one clock of the engine core, in seconds.
        received_s: When messages were received last: those that are received now came later.
        scheduled_hooks: The `on_scheduled` of the hooks that have one.
        step_hooks: The `on_step` of the hooks that have one.
        unsent: The events that have not been sent to the front end.
    """

    def __init__(self, hooks: Sequence[EventHook], clock: Callable[[], float]) -> None:
        self.received_s = clock()
        self.unsent: list[RequestEvent] = []
        self.scheduled_hooks = [hook.on_scheduled for hook in hooks if _overrides(hook, "on_scheduled")]
        self.step_hooks = [hook.on_step for hook in hooks if _overrides(hook, "on_step")]
        self._status_hooks = [hook.on_status for hook in hooks if _overrides(hook, "on_status")]
        self.clock = clock
        self._came_s: float | None = None

    def begin_arrival(self, arrival_s: float, *, is_idle: bool) -> None:
        """A request is added, whose first state has the time at which it came: a step may have delayed it.

        `arrival_s`: By the clock of its sender, which may be that of another machine; 0 where that is not known.
        `is_idle`: Whether there was no step that it could have waited for.
        """
        now_s = self.clock()
        if is_idle:
            self.received_s = now_s
        self._came_s = min(max(arrival_s, self.received_s), now_s) if arrival_s else now_s

    def end_arrival(self) -> None:
        """The request is added."""
        self._came_s = None

    def on_status(self, request_id: str, status: RequestStatus) -> None:
        """Notes that a request enters a state."""
        event = RequestEvent(request_id, status, self.clock() if self._came_s is None else self._came_s)
        if status in _REPORTED_STATES:
            self.unsent.append(event)
        for hook in self._status_hooks:
            _call(hook, event)

    def on_scheduled(self, scheduled: SchedulerOutput) -> None:
        """Calls the hooks before a step is computed."""
        for hook in self.scheduled_hooks:
            _call(hook, scheduled)

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Calls the hooks after a step."""
        for hook in self.step_hooks:
            _call(hook, record, outputs)

    def take(self) -> list[RequestEvent]:
        """Returns `unsent` and clears it."""
        unsent, self.unsent = self.unsent, []
        return unsent


def _overrides(hook: EventHook, name: str) -> bool:
    return getattr(type(hook), name, None) not in (None, getattr(EventHook, name))


def _call(method: Callable[..., None], *arguments: object) -> None:
    try:
        method(*arguments)
    except Exception:  # a user's hook must not end the requests of all users
        logger.exception("an event hook failed")


def note_of(request: EngineCoreRequest, begun_s: float) -> RequestNote:
    """The facts of a request that explanations need beside its steps; `begun_s` is the engine core's start."""
    came_s, deadline_s = request.arrival_time_s, request.deadline_s
    given_s = 0.0 if deadline_s is None else max(deadline_s - came_s, 0.0)
    earlier_s = came_s if 0 < came_s < begun_s else 0.0
    return RequestNote(len(request.output_token_ids), request.lora_name or "", earlier_s, given_s)


class StepRecorder(EventHook):
    """Keeps the last steps and events, within bounds.

    The rows of a step are kept as columns: hundreds of rows that outlive their step would occupy the garbage collector.
    """

    def __init__(
        self,
        max_steps: int = 512,
        max_rows: int = 16_384,
        max_events: int = 4096,
        max_tenants: int = 16_384,
        begun_s: float = 0.0,
    ) -> None:
        """`max_rows` bounds the rows of all steps together; the last step is kept whatever it has.

        `max_tenants`: The last requests whose tenants, and whose notes, are kept.
        `begun_s`: When the engine core began.
        """
        self._max_steps = max_steps
        self._max_rows = max_rows
        self._num_rows = 0
        self._steps: deque[tuple[StepRecord, RowColumns]] = deque()
        self._events: deque[RequestEvent] = deque(maxlen=max_events)
        self._max_tenants = max_tenants
        self._id_to_tenant: dict[str, str] = {}
        self._id_to_note: dict[str, RequestNote] = {}
        self._begun_s = begun_s

    def note_request(self, request: EngineCoreRequest) -> None:
        """Notes the tenant of a request, and what else its steps do not say; the oldest one is forgotten."""
        if request.tenant:
            self._keep(self._id_to_tenant, request.request_id, request.tenant)
        note = note_of(request, self._begun_s)
        if any(note):
            self._keep(self._id_to_note, request.request_id, note)

    def note_returns(self, returns: Iterable[SessionReturn]) -> None:
        """Notes the sessions that requests have gone on with."""
        for one in returns:
            note = self._id_to_note.get(one.request_id, RequestNote())
            self._keep(self._id_to_note, one.request_id, note._replace(went_on=one))

    def _keep(self, id_to_value: dict[str, ValueT], request_id: str, value: ValueT) -> None:
        id_to_value[request_id] = value
        if len(id_to_value) > self._max_tenants:
            del id_to_value[next(iter(id_to_value))]

    def on_status(self, event: RequestEvent) -> None:
        """Keeps the event, within the bound."""
        self._events.append(event)

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Keeps it, and gives up the oldest ones over the bounds; a step without any work has nothing to show."""
        if not record.rows and not record.encoder_work:
            return
        rows = RowColumns.of(record.rows)
        self._steps.append((record._replace(rows=rows), rows))
        self._num_rows += len(record.rows)
        while len(self._steps) > self._max_steps or (self._num_rows > self._max_rows and len(self._steps) > 1):
            self._num_rows -= len(self._steps.popleft()[1])

    def read(self, now_s: float, after_step: int = 0) -> StepRecording:
        """The kept steps after `after_step`, and the events since that step began."""
        kept = [(step, rows) for step, rows in self._steps if step.stats.step > after_step]
        since_s = next((step.start_s for step, _ in self._steps if step.stats.step == after_step), -math.inf)
        events = [event for event in self._events if event.time_s >= since_s]
        request_ids = {event.request_id for event in events}.union(*[rows.request_ids for _, rows in kept])
        tenants = {request_id: self._tenant_of(request_id) for request_id in request_ids} if self._id_to_tenant else {}
        notes = {one: self._id_to_note[one] for one in self._id_to_note.keys() & request_ids}
        steps = [step for step, _ in kept]
        return StepRecording(now_s, steps, events, {one: found for one, found in tenants.items() if found}, notes)

    def _tenant_of(self, request_id: str) -> str:
        """The tenant of a request, or of the beam search that it is a row of; empty where it is not known."""
        search_id = request_id.rpartition(BEAM_MARK)[0]
        return self._id_to_tenant.get(request_id) or self._id_to_tenant.get(search_id, "")


class StepLogger(EventHook):
    """One line of the log per step, at level DEBUG."""

    def on_step(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        """Logs the batch, its outputs and the queues."""
        logger.debug(
            "STEP %d: %d requests scheduled, %d tokens in the batch, %d sampled, %d finished, %d running, %d waiting",
            record.stats.step, len(record.rows), sum(row.num_scheduled_tokens for row in record.rows),
            sum(len(output.new_token_ids) for output in outputs.outputs),
            sum(output.finish_reason is not None for output in outputs.outputs),
            record.stats.num_running, record.stats.num_waiting,
        )  # fmt: skip
