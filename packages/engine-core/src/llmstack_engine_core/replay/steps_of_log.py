"""The steps of a log as a recorder would have kept them."""

from __future__ import annotations

from collections import deque

from llmstack_engine_core.control_plane import build_scheduler
from llmstack_engine_core.replay.derive import derive_decisions
from llmstack_engine_core.step_log import RecordedRun
from llmstack_engine_core.step_log.decisions import SCHEDULED, UPDATED, scheduled_rows
from llmstack_engine_core.step_log.logged_scheduler import MICROSECONDS
from llmstack_engine_core.step_log.packing import unpack
from llmstack_engine_core.step_log.records import Checkpoint
from llmstack_types import RequestEvent, RequestStatus, ScheduledRequest, StepPhases, StepRecord, StepRecording

MAX_EVENTS = 200_000
_NO_TIME = StepPhases(0.0, 0.0, 0.0)


def steps_of_log(run: RecordedRun, max_steps: int) -> StepRecording:
    """The last `max_steps` steps of a run with rows, and the states that requests entered meanwhile.

    A step lasts until its results came; a log has no times of its parts.

    Raises:
        StepLogError: The log cannot be replayed.
    """
    steps: list[StepRecord] = []
    statuses: list[tuple[str, RequestStatus]] = []
    events: deque[RequestEvent] = deque(maxlen=MAX_EVENTS)
    scheduler = build_scheduler(*run.header.configs(), lambda request_id, status: statuses.append((request_id, status)))
    now_s = 0.0
    for item in derive_decisions(run.events(), scheduler):
        if isinstance(item, Checkpoint):
            continue
        kind, decided = unpack(item.packed, list)
        now_s = item.now_us / MICROSECONDS
        events += [RequestEvent(request_id, status, now_s) for request_id, status in statuses]
        statuses.clear()
        if kind == SCHEDULED and (rows := scheduled_rows(decided)):
            scheduled = [
                ScheduledRequest(name, computed, num_tokens, block_ids or [], draft_ids or [])
                for name, computed, num_tokens, block_ids, draft_ids in rows
            ]
            steps.append(StepRecord(now_s, _NO_TIME, scheduler.stats(), scheduled))
            if len(steps) > 2 * max_steps:
                del steps[:max_steps]
        elif kind == UPDATED and steps:
            steps[-1] = steps[-1]._replace(phases=StepPhases(0.0, now_s - steps[-1].start_s, 0.0))
    steps = steps[-max_steps:]
    first_s = steps[0].start_s if steps else 0.0
    return StepRecording(now_s, steps, [event for event in events if event.time_s >= first_s])
