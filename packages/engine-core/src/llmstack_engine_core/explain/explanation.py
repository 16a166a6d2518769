"""Sentences on where the time of a request went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from llmstack_engine_core.explain.history import (
    PREEMPTIONS,
    History,
    UnknownRequestError,
    duration_of,
    end_of,
    num_prefill_tokens,
)
from llmstack_engine_core.prediction.cost_model import LinearCostModel, fit_cost_model, step_work
from llmstack_engine_core.prediction.errors import SimulationError
from llmstack_types import RequestStatus, ScheduledRequest, StepRecord, StepRecording

FOREIGN = "another key's request"
# A cost model that is further off than this is no estimate.
MAX_ERROR = 0.5
MIN_STEPS_TO_FIT = 8
# Times of a log are whole microseconds.
CLOCK_S = 1e-6

__all__ = ["Explanation", "Limits", "UnknownRequestError", "explain"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step; None where they are not known."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the time of one request went.

    Attributes:
        sentences: For people, in the order of time.
        facts: The explanation in figures; times are in milliseconds.
    """

    request_id: str
    sentences: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def explain(
    log: StepRecording,
    request_id: str,
    limits: Limits | None = None,
    is_shown: Callable[[str], bool] | None = None,
) -> Explanation:
    """Explains a request from the steps that are kept. O(rows).

    `is_shown`: Whether the reader may know the id of another request; all are known without it.

    Raises:
        UnknownRequestError: The log has nothing of this request.
    """

    def name_of(other: str) -> str:
        return other if is_shown is None or is_shown(other) else FOREIGN

    history = History.of(log, request_id, name_of)
    made = Explanation(request_id)
    for part in (_state, _preparation, _queue, _prefix_cache, _prefill, _decodes, _preemptions, _alone):
        for sentence in part(history, limits or Limits(), made.facts):
            made.sentences.append(sentence)
    return made


def _state(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    status = history.status
    facts["status"] = None if status is None else status.value
    if history.arrived_s is None:
        yield "Its beginning is no longer kept: what follows is about its last steps."
    end_s = end_of(history.own[-1][0]) if history.own else history.events[-1].time_s
    start_s = (
        history.arrived_s if history.arrived_s is not None else (history.own[0][0].start_s if history.own else end_s)
    )
    facts["total_ms"] = to_ms(end_s - start_s)
    ended = status is not None and status.value.startswith("finished")
    state = "It is not over" if status is None or not ended else f"It ended ({status.value.replace('_', ' ')})"
    yield f"{state}, {to_text(end_s - start_s)} after it came, with {len(history.own)} steps."


def _preparation(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """Waits before the queue: for a compiled grammar, for the weights of an adapter."""
    for status, what in (
        (RequestStatus.WAITING_FOR_GRAMMAR, "its grammar was compiled"),
        (RequestStatus.WAITING_FOR_ADAPTER, "the weights of its adapter were read"),
    ):
        for event, following in zip(history.events, history.events[1:], strict=False):
            if event.status is status:
                seconds = following.time_s - event.time_s
                facts[f"{status.value}_ms"] = to_ms(seconds)
                yield f"It waited {to_text(seconds)} while {what}."


def _queue(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    queued_s = history.queued_s
    if queued_s is None:
        return
    if not history.own:
        yield "It has not been in a step yet."
        return
    first, row = history.own[0]
    waited_s = max(0.0, first.start_s - queued_s)
    facts["queue_ms"] = to_ms(waited_s)
    steps = history.steps_between(queued_s, first.start_s)
    if not steps:
        yield f"It was queued for {to_text(waited_s)}: no step was being computed."
        return
    cause, sentence = _cause(history, limits, steps, row)
    facts["queue_cause"] = cause
    yield f"It was queued for {to_text(waited_s)}: {sentence}."
    heaviest = _heaviest(history, steps)
    if heaviest is not None:
        name, num_tokens = heaviest
        facts["queued_behind"], facts["queued_behind_tokens"] = name, num_tokens
        yield f"Most of these steps' prompt tokens, {num_tokens}, were of {name}."


def _cause(history: History, limits: Limits, steps: Sequence[StepRecord], row: ScheduledRequest) -> tuple[str, str]:
    last = steps[-1].stats
    if len(steps) == 1:
        return "step", f"it came during step {last.step}, which took {to_text(duration_of(steps[0]))}"
    span = f"{len(steps)} steps were computed before its first one"
    if limits.max_num_seqs is not None and min(one.stats.num_running for one in steps[:-1]) >= limits.max_num_seqs:
        return "places", f"all {limits.max_num_seqs} places of a step were taken, and {span}"
    need, free = len(row.new_block_ids), min(one.stats.num_free_blocks for one in steps)
    if free < need:
        return "blocks", f"{need} blocks of the KV cache were needed and {free} were free, and {span}"
    budget = limits.max_num_batched_tokens
    if budget is not None and all(_num_tokens(one) >= budget for one in steps[1:]):
        return "token budget", f"others used all {budget} tokens of each step, and {span}"
    return "others", f"others were ahead of it, and {span}"


def _heaviest(history: History, steps: Sequence[StepRecord]) -> tuple[str, int] | None:
    """The other request with the most tokens of prompts in some steps."""
    tokens: Counter[str] = Counter()
    for record in steps:
        for row in history.others(record):
            tokens[row.request_id] += num_prefill_tokens([row])
    request_id, num_tokens = max(tokens.items(), key=lambda pair: pair[1], default=("", 0))
    return (history.name_of(request_id), num_tokens) if num_tokens else None


def _prefix_cache(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    if not history.own or history.queued_s is None:
        return
    num_cached = history.num_cached_tokens
    num_prompt = num_cached + sum(row.num_scheduled_tokens for _, row in history.prefill)
    facts["prompt_tokens"], facts["cached_tokens"] = num_prompt, num_cached
    if num_cached:
        yield f"The prefix cache held {num_cached} of the {num_prompt} tokens of its prompt."
    else:
        yield f"The prefix cache held nothing of its prompt of {num_prompt} tokens."


def _prefill(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    if not history.own or history.queued_s is None:
        return
    seconds = end_of(history.prefill[-1][0]) - history.prefill[0][0].start_s
    facts["prefill_steps"], facts["prefill_ms"] = len(history.prefill), to_ms(seconds)
    facts["ttft_ms"] = to_ms(end_of(history.prefill[-1][0]) - (history.arrived_s or history.queued_s))
    num_others = sum(num_prefill_tokens(history.others(record)) for record, _ in history.prefill)
    beside = f", beside {num_others} tokens of other prompts" if num_others else ""
    steps = "one step" if len(history.prefill) == 1 else f"{len(history.prefill)} steps"
    yield f"The rest of its prompt was computed in {steps} of {to_text(seconds)}{beside}."


def _decodes(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    decodes = history.decodes
    if not decodes:
        return
    alone = [duration_of(record) for record, _ in decodes if not num_prefill_tokens(history.others(record))]
    longer = [(record, duration_of(record)) for record, _ in decodes if num_prefill_tokens(history.others(record))]
    total_s = sum(duration_of(record) for record, _ in decodes)
    facts["decode_steps"], facts["decode_ms"] = len(decodes), to_ms(total_s)
    num_drafts = sum(len(row.draft_token_ids) for _, row in decodes)
    drafted = f", with {num_drafts} drafted tokens to verify" if num_drafts else ""
    yield f"It decoded in {len(decodes)} steps of {to_text(total_s)} together{drafted}."
    if alone and longer:
        usual_s = median(alone)
        lost_s = sum(max(0.0, seconds - usual_s) for _, seconds in longer)
        facts["slowed_steps"], facts["slowed_ms"] = len(longer), to_ms(lost_s)
        heaviest = _heaviest(history, [record for record, _ in longer])
        blame = f", most of them of {heaviest[0]}" if heaviest else ""
        yield (
            f"{len(longer)} of these steps also computed prompts of other requests{blame}, and took "
            f"{to_text(lost_s)} more than {len(longer)} steps without any."
        )


def _preemptions(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    events = [event for event in history.events if event.status in PREEMPTIONS]
    facts["preemptions"] = len(events)
    for event in events:
        before = [row for record, row in history.own if record.start_s < event.time_s]
        after = next(((record, row) for record, row in history.own if record.start_s >= event.time_s), None)
        takers = [record for record in history.steps if end_of(record) > event.time_s + CLOCK_S][:1]
        taker = _taker(history, takers)
        who = f" since {taker} needed blocks" if taker else ""
        if after is None:
            yield f"It was preempted{who}, and has not gone on yet."
            continue
        lost_s = after[0].start_s - event.time_s
        facts["preempted_ms"] = facts.get("preempted_ms", 0.0) + to_ms(lost_s)
        known = before[-1].num_computed_tokens + before[-1].num_scheduled_tokens if before else 0
        again = max(0, known - after[1].num_computed_tokens)
        facts["recomputed_tokens"] = facts.get("recomputed_tokens", 0) + again
        computed = f", and {again} of its tokens were computed again" if again else ""
        yield f"It was preempted{who}: it went on after {to_text(lost_s)}{computed}."


def _taker(history: History, steps: Sequence[StepRecord]) -> str | None:
    """The other request that got the most blocks in some steps."""
    blocks: Counter[str] = Counter()
    for record in steps:
        for row in history.others(record):
            blocks[row.request_id] += len(row.new_block_ids)
    request_id, count = max(blocks.items(), key=lambda pair: pair[1], default=("", 0))
    return history.name_of(request_id) if count else None


def _alone(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """An estimate of the same steps without other requests."""
    fitted = _fit(history.steps)
    if fitted is None or not history.own or history.queued_s is None:
        return
    model, error = fitted
    seconds = sum(model.step_s(step_work([row])) for _, row in history.own)
    facts["alone_ms"], facts["model_error"] = to_ms(seconds), round(error, 3)
    yield (
        f"Alone, its steps would have taken about {to_text(seconds)}. This is an estimate: "
        f"on the measured steps, its cost model is off by {100 * error:.0f} % at the median."
    )


def _fit(steps: Sequence[StepRecord]) -> tuple[LinearCostModel, float] | None:
    """A cost model of these steps and its median relative error; None where there are too few, or it is too far off."""
    measured = [(step_work(record.rows), duration_of(record)) for record in steps if record.rows]
    measured = [(work, seconds) for work, seconds in measured if seconds > 0]
    if len(measured) < MIN_STEPS_TO_FIT:
        return None
    try:
        model = fit_cost_model(measured)
    except SimulationError:
        return None
    error = median(abs(model.step_s(work) - seconds) / seconds for work, seconds in measured)
    return (model, error) if error <= MAX_ERROR else None


def _num_tokens(record: StepRecord) -> int:
    return sum(row.num_scheduled_tokens for row in record.rows)


def to_ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def to_text(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
