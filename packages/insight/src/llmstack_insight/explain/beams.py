"""A beam search as one request: its beams are requests of the engine core."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from llmstack_engine_core.admission import BEAM_MARK
from llmstack_insight.explain.history import PREEMPTIONS
from llmstack_types import RequestEvent, ScheduledRequest, StepRecording


def join_beams(log: StepRecording, search_id: str) -> tuple[StepRecording, int]:
    """The log with the beams of a search as one request, and how many there were; 0 where it is no search.

    Its first row is the prompt's. A later one stands for the beams of a step, and counts as one decode.
    """
    mark = f"{search_id}{BEAM_MARK}"
    beams = {row.request_id: None for record in log.steps for row in record.rows if row.request_id.startswith(mark)}
    beams |= {event.request_id: None for event in log.events if event.request_id.startswith(mark)}
    if not beams:
        return log, 0
    first = f"{mark}1"
    steps = [
        record._replace(
            rows=list(_joined(record.rows, search_id, beams, first)),
            media={search_id if name == first else name: items for name, items in record.media.items()},
        )
        for record in log.steps
    ]
    events = list(_events(log.events, search_id, beams, first))
    tenants = {**log.tenants, search_id: log.tenants.get(next(iter(beams)), "")}
    return log._replace(steps=steps, events=events, tenants=tenants), len(beams)


def _joined(
    rows: Iterable[ScheduledRequest], search_id: str, beams: Iterable[str], first: str
) -> Iterator[ScheduledRequest]:
    own = []
    for row in rows:
        if row.request_id in beams:
            own.append(row)
        else:
            yield row
    if len(own) == 1 and own[0].request_id == first:
        yield own[0]._replace(request_id=search_id)
    elif own:
        num_computed = max(row.num_computed_tokens + row.num_scheduled_tokens for row in own) - 1
        yield ScheduledRequest(search_id, num_computed, 1, [one for row in own for one in row.new_block_ids], [])


def _events(events: Sequence[RequestEvent], search_id: str, beams: Iterable[str], first: str) -> Iterator[RequestEvent]:
    """The events of the first beam up to its end, preemptions of any, and the end of the last if none is left."""
    own = [event for event in events if event.request_id in beams]
    last = own[-1] if own and _is_end(own[-1]) else None
    for event in events:
        if event.request_id not in beams:
            yield event
        elif event is last or event.status in PREEMPTIONS or (event.request_id == first and not _is_end(event)):
            yield event._replace(request_id=search_id)


def _is_end(event: RequestEvent) -> bool:
    return event.status.value.startswith("finished")
