"""Sentences on what a request would have been, beside the error of the estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from llmstack_core_scheduler import SchedulerConfig
from llmstack_engine_client.prediction.cost_model import LinearCostModel, StepWork, step_work
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.explain.explanation import MAX_ERROR, Explanation
from llmstack_insight.explain.history import History, duration_of, end_of
from llmstack_insight.explain.what_if import Change, Times, TooMuchError, Work, changes_to_try, run_again
from llmstack_insight.explain.wording import to_ms, to_text
from llmstack_insight.explain.workload import Workload
from llmstack_insight.rerun import fit_to_steps
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import StepRecord, StepRecording

# A change that saves less is not named.
MIN_GAIN = 0.05
MIN_TTFT = 0.1
MIN_GAIN_S = 0.005
_ALONE = "Alone, "


def add_estimates(
    made: Explanation,
    log: StepRecording,
    workload: Workload | None,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    work: Work | None = None,
) -> None:
    """Adds what the request would have been alone, and with each of some settings changed.

    `scheduler`, `cache`: As they were in the run.
    `work`: The rows of the replays, of which there are about ten.
    """
    why_not = _estimate(made, log, workload, scheduler, cache, work or Work())
    if why_not:
        made.facts["no_estimate"] = why_not
        made.sentences.append(f"There is no estimate of other settings: {why_not}.")


def _estimate(
    made: Explanation,
    log: StepRecording,
    workload: Workload | None,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    work: Work,
) -> str | None:
    """Adds the estimates; otherwise says why there are none."""
    if made.facts.get("beams"):
        return "a beam search is not replayed"
    if workload is None:
        return "its beginning is no longer kept, or it has no token yet"
    try:
        model = model_of_steps(log.steps)
    except SimulationError:
        return "too few steps were measured"
    measured, num_left = _measured(log, workload), work.num_left
    try:
        unchanged = run_again(workload, scheduler, cache, model, work)
        num_rows = num_left - work.num_left
        alone = run_again(workload.alone(), scheduler, cache, model, work)
    except TooMuchError:
        return "the server is too busy" if work.is_late else "too much happened while it was there"
    error = max(_shares(unchanged, measured, abs))
    made.facts["replayed"] = facts = {
        "measured": _facts(measured), "unchanged": _facts(unchanged), "error": round(error, 3),
        "has_tokens": workload.has_tokens,
    }  # fmt: skip
    if error > MAX_ERROR:
        return f"a replay with the settings of the run is off by {100 * error:.0f} %"
    facts["alone"] = _facts(alone)
    made.facts["alone_ms"] = to_ms(alone.total_s)
    made.sentences[:] = [one for one in made.sentences if not one.startswith(_ALONE)]
    made.sentences.append(
        f"{_ALONE}it would have taken about {to_text(alone.total_s)}, the first token after {to_text(alone.ttft_s)}. "
        f"This is an estimate: a replay with the settings of the run is off by {100 * error:.0f} %."
    )
    tried, not_tried = _try_all(workload, scheduler, cache, model, work, num_rows)
    facts["changes"] = [{"change": change.name, **_facts(times)} for change, times in tried]
    if tried:
        made.sentences.append(_advice(tried, unchanged, error))
    if not_tried:
        facts["not_tried"] = not_tried
        why = "The server is too busy" if work.is_late else "Too much happened while it was there"
        made.sentences.append(f"{why} to try more: {', '.join(not_tried)}.")
    return None


def model_of_steps(steps: Sequence[StepRecord]) -> LinearCostModel:
    """The cost model under which these steps take as long as they did.

    Raises:
        SimulationError: There are too few steps.
    """
    return fit_to_steps(_periods(steps))


def _periods(steps: Sequence[StepRecord]) -> list[tuple[StepWork, float]]:
    """Each step's work, and the seconds to the next one if a request is in both: what is between counts, too."""
    periods = []
    for record, following in zip_longest(steps, steps[1:]):
        seconds = duration_of(record)
        if seconds <= 0 or record.encoder_work:
            continue  # its results never came, or what was encoded takes a part of its time that no model knows
        if following is not None:
            names = {row.request_id for row in following.rows}
            if any(row.request_id in names for row in record.rows):
                seconds = max(seconds, following.start_s - record.start_s)
        periods.append((step_work(record.rows), seconds))
    return periods


def _try_all(
    workload: Workload,
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    model: LinearCostModel,
    work: Work,
    num_rows: int,
) -> tuple[list[tuple[Change, Times]], list[str]]:
    """The changes with their times, and the names of those for which no work was left; each takes about `num_rows`."""
    tried, not_tried = [], []
    for change in changes_to_try(workload, scheduler, cache):
        if work.num_left < num_rows or work.is_late:
            not_tried.append(change.name)
            continue
        try:
            tried.append((change, run_again(workload, change.scheduler, change.cache, model, work)))
        except TooMuchError:
            if work.num_left <= 0 or work.is_late:
                not_tried.append(change.name)  # otherwise it makes the request much slower
    return tried, not_tried


def _advice(tried: list[tuple[Change, Times]], unchanged: Times, error: float) -> str:
    """The one change that would have helped most, if one is above the error."""
    names = ", ".join(change.name for change, _ in tried)
    helpful = [pair for pair in tried if _gain(pair[1], unchanged) > max(MIN_GAIN, error)]
    # Seconds, since a large share of a short wait is little.
    best = min(helpful, key=lambda pair: pair[1].ttft_s + pair[1].total_s, default=None)
    if best is None:
        return f"No single change of those tried would have helped by more than the estimate's error: {names}."
    change, times = best
    return (
        f"With {change.name} it would have taken about {to_text(times.total_s)}, the first token after "
        f"{to_text(times.ttft_s)}, where the same estimate says {to_text(unchanged.total_s)} and "
        f"{to_text(unchanged.ttft_s)} without the change."
    )


def _gain(times: Times, unchanged: Times) -> float:
    """The larger share that is saved: of the time to the first token, or of the whole, which must not be longer."""
    saved_s = max(unchanged.ttft_s - times.ttft_s, unchanged.total_s - times.total_s)
    if times.total_s > unchanged.total_s or saved_s < MIN_GAIN_S:
        return 0.0
    return max(_shares(times, unchanged, lambda seconds: -seconds))


def _measured(log: StepRecording, workload: Workload) -> Times:
    own, over_s = workload.own, History.of(log, workload.request_id, str).end_s
    num_prompt = len(own.request.prompt_token_ids) + len(own.request.output_token_ids)
    ends = [
        (min(end_of(record), over_s), row.num_computed_tokens + row.num_scheduled_tokens - len(row.draft_token_ids))
        for record in log.steps
        if duration_of(record) > 0
        for row in record.rows
        if row.request_id == workload.request_id
    ]
    last_s = ends[-1][0]
    first_s = next((end_s for end_s, num_tokens in ends if num_tokens >= num_prompt), last_s)
    return Times(first_s - own.time_s, last_s - own.time_s)


def _shares(times: Times, usual: Times, of: Callable[[float], float]) -> tuple[float, float]:
    """The differences of the two times from the usual ones, in parts of these.

    A first token that came at once counts as `MIN_TTFT` of the whole: a few milliseconds more or less are no matter.
    """
    if usual.total_s <= 0:
        return 1.0, 1.0
    ttft_s = max(usual.ttft_s, MIN_TTFT * usual.total_s)
    return of(times.ttft_s - usual.ttft_s) / ttft_s, of(times.total_s - usual.total_s) / usual.total_s


def _facts(times: Times) -> dict[str, Any]:
    return {"ttft_ms": to_ms(times.ttft_s), "total_ms": to_ms(times.total_s)}
