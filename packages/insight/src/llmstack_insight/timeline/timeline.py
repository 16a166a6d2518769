"""The steps of an engine core, as JSON that is small enough for a live page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llmstack_engine_core.row_columns import RowColumns
from llmstack_insight.timeline.runs import runs_of
from llmstack_types import RequestEvent, StepRecord, StepRecording


def timeline_of(
    log: StepRecording,
    at: Callable[[float], float] = float,
    is_shown: Callable[[str], bool] | None = None,
) -> dict[str, list[list[Any]]]:
    """Steps, runs of requests and events, each as a list of its values.

    - A step: its number, time and milliseconds, running and waiting requests, used and all blocks, preemptions so far
      and tokens.
    - A run, consecutive steps in which a request did the same: see `runs_of`.
    - An event: the id of the request, the time, and the state that it entered.

    `at`: Turns monotonic seconds into the time to show.
    `is_shown`: Whether the reader may see a request; None sees all. Others see the steps that their requests were in,
        with the requests and tokens of their own alone, and no numbers of blocks.
    """
    if is_shown is None:
        steps = [_step(record, at) for record in log.steps]
    else:
        steps = [own for record in log.steps if (own := _own_step(record, at, is_shown)) is not None]
    return {"steps": steps, "runs": runs_of(log.steps, is_shown), "events": _events(log.events, at, is_shown)}


def _step(record: StepRecord, at: Callable[[float], float]) -> list[Any]:
    stats = record.stats
    return [
        *_times(record, at), stats.num_running, stats.num_waiting, stats.num_blocks - stats.num_free_blocks,
        stats.num_blocks, stats.num_preemptions, sum(RowColumns.of(record.rows).num_scheduled_tokens),
    ]  # fmt: skip


def _own_step(record: StepRecord, at: Callable[[float], float], is_shown: Callable[[str], bool]) -> list[Any] | None:
    rows = RowColumns.of(record.rows)
    own = [
        num_tokens for name, num_tokens in zip(rows.request_ids, rows.num_scheduled_tokens, strict=True)
        if is_shown(name)
    ]  # fmt: skip
    return [*_times(record, at), len(own), None, None, None, None, sum(own)] if own else None


def _times(record: StepRecord, at: Callable[[float], float]) -> tuple[int, float, float]:
    phases = record.phases
    milliseconds = 1000 * (phases.schedule_s + phases.execute_s + phases.update_s)
    return record.stats.step, round(at(record.start_s), 6), round(milliseconds, 3)


def _events(
    events: Iterable[RequestEvent], at: Callable[[float], float], is_shown: Callable[[str], bool] | None
) -> list[list[Any]]:
    return [
        [event.request_id, round(at(event.time_s), 6), event.status.value]
        for event in events
        if is_shown is None or is_shown(event.request_id)
    ]
