"""The steps of an engine core, as JSON that is small enough for a live page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llmstack_engine_core.row_columns import RowColumns
from llmstack_types import RequestEvent, StepRecord, StepRecording

PREFILL, DECODE = "p", "d"


def timeline_of(
    log: StepRecording,
    at: Callable[[float], float] = float,
    is_shown: Callable[[str], bool] | None = None,
) -> dict[str, list[list[Any]]]:
    """Steps, runs of requests and events, each as a list of its values.

    - A step: its number, time and milliseconds, running and waiting requests, used and all blocks, preemptions so far
      and tokens.
    - A run, consecutive steps in which a request did the same: its id, first and last step, `p` for prefill chunks or
      `d` for decodes, tokens, drafted tokens and new blocks.
    - An event: the id of the request, the time, and the state that it entered.

    `at`: Turns monotonic seconds into the time to show.
    `is_shown`: Whether the reader may see a request; one that may not see all sees no numbers of blocks either.
    """
    return {
        "steps": [_step(record, at, is_shown is None) for record in log.steps],
        "runs": _runs(log.steps, is_shown),
        "events": _events(log.events, at, is_shown),
    }


def _step(record: StepRecord, at: Callable[[float], float], has_blocks: bool) -> list[Any]:
    stats, phases = record.stats, record.phases
    milliseconds = 1000 * (phases.schedule_s + phases.execute_s + phases.update_s)
    used_blocks = stats.num_blocks - stats.num_free_blocks if has_blocks else None
    num_tokens = sum(RowColumns.of(record.rows).num_scheduled_tokens)
    return [
        stats.step, round(at(record.start_s), 6), round(milliseconds, 3), stats.num_running, stats.num_waiting,
        used_blocks, stats.num_blocks if has_blocks else None, stats.num_preemptions, num_tokens,
    ]  # fmt: skip


def _runs(steps: Iterable[StepRecord], is_shown: Callable[[str], bool] | None) -> list[list[Any]]:
    runs: list[list[Any]] = []
    id_to_run: dict[str, list[Any]] = {}
    for record in steps:
        step, rows = record.stats.step, RowColumns.of(record.rows)
        for index, (request_id, num_tokens) in enumerate(zip(rows.request_ids, rows.num_scheduled_tokens, strict=True)):
            if is_shown is not None and not is_shown(request_id):
                continue
            num_drafts = len(rows.draft_token_ids.get(index, ())) if num_tokens > 1 else 0
            kind = PREFILL if num_tokens - num_drafts > 1 else DECODE
            run = id_to_run.get(request_id)
            if run is None or run[3] != kind or run[2] != step - 1:
                run = id_to_run[request_id] = [request_id, step, step, kind, 0, 0, 0]
                runs.append(run)
            run[2] = step
            run[4] += num_tokens
            run[5] += num_drafts
            if index in rows.new_block_ids:
                run[6] += len(rows.new_block_ids[index])
    return runs


def _events(
    events: Iterable[RequestEvent], at: Callable[[float], float], is_shown: Callable[[str], bool] | None
) -> list[list[Any]]:
    return [
        [event.request_id, round(at(event.time_s), 6), event.status.value]
        for event in events
        if is_shown is None or is_shown(event.request_id)
    ]
