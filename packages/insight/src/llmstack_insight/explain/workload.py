"""Prompts, tokens and times of the requests around one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

from llmstack_insight.explain.history import end_of, num_prefill_tokens
from llmstack_step_log import Run
from llmstack_step_log.primitives import MICROSECONDS
from llmstack_step_log.records import (
    RequestAdded,
    RequestForked,
    RequestsAborted,
    StepScheduled,
    StepUpdated,
)
from llmstack_step_log.snapshots import Snapshot
from llmstack_types import (
    EngineCoreRequest,
    RequestStatus,
    SamplingParams,
    ScheduledRequest,
    StepRecord,
    StepRecording,
)

# What came after a request, for so long a part of its time, counts: with a change it may end later.
_AFTER = 0.5


@dataclass(slots=True)
class Arrival:
    """One request, with its end.

    Attributes:
        time_s: When it came; the beginning of the workload for one that was there before.
        output_token_ids: The tokens that it got.
        aborted_s: When it was aborted, if it was.
        num_found_tokens: Tokens of its prompt that were in the prefix cache, or computed before the workload begins.
    """

    request: EngineCoreRequest
    time_s: float
    output_token_ids: list[int] = field(default_factory=list)
    aborted_s: float | None = None
    num_found_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests around one, in the order in which they came.

    Attributes:
        has_tokens: Whether the tokens of the prompts are known, and not their lengths alone.
    """

    request_id: str
    arrivals: Sequence[Arrival]
    has_tokens: bool

    @property
    def own(self) -> Arrival:
        """The arrival of `request_id`."""
        return next(one for one in self.arrivals if one.request.request_id == self.request_id)

    def alone(self) -> Workload:
        """The request without the others."""
        return replace(self, arrivals=[self.own])


def workload_of_log(run: Run, log: StepRecording, request_id: str) -> Workload | None:
    """The requests of a step log around one; None where its beginning is not among the steps.

    `log`: The steps of the run that are kept.
    """
    step_to_rows = {record.stats.step: record.rows for record in log.steps}
    first_rows = _first_rows(log.steps)
    known = _known_at(run.start, first_rows)
    arrived = _arrived(log)
    waiting: list[EngineCoreRequest] = []
    step, now_s = (0, 0.0) if run.start is None else (run.start.place.num_steps, run.start.now_s)
    last_step = max(step_to_rows, default=0)
    for event in run.events():
        match event:
            case RequestAdded(request) | RequestForked(_, request):
                if request.request_id in first_rows:
                    waiting.append(request)
            case RequestsAborted(request_ids):
                _abort(known, request_ids, now_s)
            case StepScheduled(now_us):
                step, now_s = step + 1, now_us / MICROSECONDS
                if step > last_step:
                    break
                for request in waiting:
                    known[request.request_id] = Arrival(request, arrived.get(request.request_id, now_s))
                waiting.clear()
            case StepUpdated():
                now_s = event.now_us / MICROSECONDS
                _take(known, step_to_rows.get(step - event.lag), event.sampled_token_ids)
    arrivals = [_begin(one, first_rows[name], log.steps[0].start_s) for name, one in known.items()]
    return _around(arrivals, log.steps, request_id, has_tokens=True)


def _known_at(start: Snapshot | None, first_rows: Container[str]) -> dict[str, Arrival]:
    """The requests of a snapshot that have rows in the workload, with the tokens that they had."""
    if start is None:
        return {}
    return {
        request.request_id: Arrival(request, min(request.arrival_time_s, start.now_s))
        for request in start.live_requests()
        if request.request_id in first_rows
    }


def _abort(known: dict[str, Arrival], request_ids: Iterable[str], now_s: float) -> None:
    for request_id in request_ids:
        if request_id in known:
            known[request_id].aborted_s = now_s


def _arrived(log: StepRecording) -> dict[str, float]:
    """When requests came, as far as that is kept."""
    return {event.request_id: event.time_s for event in reversed(log.events) if event.status is RequestStatus.WAITING}


def _take(known: dict[str, Arrival], rows: Sequence[ScheduledRequest] | None, sampled: Sequence[list[int]]) -> None:
    """Notes what the rows of a step got; a step that is not kept belongs to the time before."""
    for row, token_ids in zip(rows or (), sampled, strict=False):
        if row.request_id in known:
            known[row.request_id].output_token_ids += token_ids


def _first_rows(steps: Iterable[StepRecord]) -> dict[str, ScheduledRequest]:
    first: dict[str, ScheduledRequest] = {}
    for record in steps:
        for row in record.rows:
            first.setdefault(row.request_id, row)
    return first


def _begin(arrival: Arrival, first: ScheduledRequest, start_s: float) -> Arrival:
    """The arrival in a workload that begins at `start_s`: a part of it may have been computed before."""
    request = arrival.request
    num_before = len(request.prompt_token_ids) + len(request.output_token_ids)
    num_known = first.num_computed_tokens + first.num_scheduled_tokens - len(first.draft_token_ids)
    if num_known > num_before:  # tokens of steps that are not kept: how many is known
        more = (0,) * (num_known - num_before)
        arrival.request = replace(request, output_token_ids=(*request.output_token_ids, *more))
    arrival.num_found_tokens = first.num_computed_tokens
    arrival.time_s = max(arrival.time_s, start_s)
    return arrival


def _around(
    arrivals: Iterable[Arrival], steps: Sequence[StepRecord], request_id: str, has_tokens: bool
) -> Workload | None:
    """The arrivals up to some time after the end of the request."""
    in_order = sorted(arrivals, key=lambda one: one.time_s)
    own = next((one for one in in_order if one.request.request_id == request_id), None)
    if own is None or not own.output_token_ids:
        return None
    end_s = max(end_of(record) for record in steps if any(row.request_id == request_id for row in record.rows))
    until_s = end_s + _AFTER * (end_s - own.time_s)
    return Workload(request_id, [one for one in in_order if one.time_s <= until_s], has_tokens)


def workload_of_steps(log: StepRecording, request_id: str) -> Workload | None:
    """The workload by steps alone, where prompts are lengths: each is a text of its own, with its cached tokens."""
    arrived = _arrived(log)
    if request_id not in arrived or _began_before(log, request_id):
        return None
    rows: dict[str, list[ScheduledRequest]] = {}
    for record in log.steps:
        for row in record.rows:
            rows.setdefault(row.request_id, []).append(row)
    start_s = log.steps[0].start_s if log.steps else 0.0
    arrivals = [
        _arrival_of_rows(name, own, number, arrived.get(name, start_s), log)
        for number, (name, own) in enumerate(rows.items())
    ]
    return _around(arrivals, log.steps, request_id, has_tokens=False)


def _began_before(log: StepRecording, request_id: str) -> bool:
    """Whether its first step is no longer kept."""
    start_s = log.steps[0].start_s if log.steps else 0.0
    states = (event for event in log.events if event.request_id == request_id)
    return any(event.status is RequestStatus.RUNNING and event.time_s < start_s for event in states)


def _arrival_of_rows(
    name: str, rows: Sequence[ScheduledRequest], number: int, time_s: float, log: StepRecording
) -> Arrival:
    last_chunk = rows[0]
    for row in rows:
        if not num_prefill_tokens([row]):
            break
        last_chunk = row
    num_prompt = last_chunk.num_computed_tokens + last_chunk.num_scheduled_tokens - len(last_chunk.draft_token_ids)
    last = rows[-1]
    num_known = last.num_computed_tokens + last.num_scheduled_tokens - len(last.draft_token_ids)
    num_outputs = max(1, num_known + 1 - num_prompt)
    if any(row.draft_token_ids for row in rows):  # which will be right is not known: one token for each step it took
        num_outputs = max(1, sum(row.num_computed_tokens >= num_prompt for row in rows) + 1)
    request = EngineCoreRequest(
        name,
        [number + 1] + [0] * (num_prompt - 1),
        SamplingParams(max_tokens=num_outputs, ignore_eos=True),
        arrival_time_s=time_s,
        tenant=log.tenants.get(name, ""),
        lora_name=log.notes[name].lora_name or None if name in log.notes else None,
    )
    return Arrival(request, time_s, [0] * num_outputs, num_found_tokens=rows[0].num_computed_tokens)
