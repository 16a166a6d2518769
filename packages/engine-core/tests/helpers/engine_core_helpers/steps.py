"""Records of steps, as an engine core keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from llmstack_types import ScheduledRequest, SchedulerStats, StepPhases, StepRecord


def step_record(
    number: int,
    rows: Sequence[ScheduledRequest],
    start_s: float | None = None,
    phases_s: tuple[float, float, float] = (0.0, 0.5, 0.0),
    **stats: int,
) -> StepRecord:
    """The step with a number from 1 on, which begins at second 10 and each further one a second later."""
    start_s = 9.0 + number if start_s is None else start_s
    return StepRecord(start_s, StepPhases(*phases_s), SchedulerStats(number, **stats), rows)


def step_records(batches: Sequence[Sequence[ScheduledRequest]]) -> list[StepRecord]:
    """Steps of half a second with these rows."""
    return [step_record(number, rows) for number, rows in enumerate(batches, 1)]
