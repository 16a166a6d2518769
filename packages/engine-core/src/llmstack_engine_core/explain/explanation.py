"""Sentences on where the time of a request went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from llmstack_engine_core.explain.beams import join_beams
from llmstack_engine_core.explain.history import (
    FOREIGN,
    PREEMPTIONS,
    History,
    UnknownRequestError,
    duration_of,
    end_of,
    num_prefill_tokens,
    num_tokens_of,
)
from llmstack_engine_core.prediction.cost_model import LinearCostModel, fit_cost_model, step_work
from llmstack_engine_core.prediction.errors import SimulationError
from llmstack_types import RequestStatus, ScheduledRequest, StepRecord, StepRecording

# A cost model that is further off than this is no estimate.
MAX_ERROR = 0.5
MIN_STEPS_TO_FIT = 8
# Less time than this part of the whole, and than this many seconds, needs no sentence.
MIN_SHARE = 0.05
MIN_SECONDS = 0.001
MAX_PARTS = 64
# Times of a log are whole microseconds.
CLOCK_S = 1e-6

__all__ = ["Explanation", "Limits", "UnknownRequestError", "add_parts", "explain"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step; None where they are not known."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of the time of one request.

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
    parts: Sequence[str] = (),
) -> Explanation:
    """Explains a request, or a beam search, from the steps that are kept. O(rows).

    `is_shown`: Whether the reader may know the id of another request; all are known without it.
    `parts`: All requests of its answer.

    Raises:
        UnknownRequestError: The log has nothing of this request.
    """

    def name_of(other: str) -> str:
        return other if is_shown is None or is_shown(other) else FOREIGN

    log, num_beams = join_beams(log, request_id)
    history = History.of(log, request_id, name_of, frozenset(parts), num_beams)
    made = Explanation(request_id)
    for part in (_state, _preparation, _queue, _prefix_cache, _prefill, _decodes, _preemptions, _spans, _alone):
        for sentence in part(history, limits or Limits(), made.facts):
            made.sentences.append(sentence)
    return made


def add_parts(made: Explanation, parts: Sequence[str]) -> None:
    """Says that one of several requests of an answer is explained."""
    made.facts["parts"] = list(parts[:MAX_PARTS])
    made.sentences.insert(
        0,
        f"It was computed as {len(parts)} requests, one for each prompt and completion. "
        f"This is the one that ended last, {made.request_id}.",
    )


def _state(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    status = history.status
    facts["status"] = None if status is None else status.value
    if history.arrived_s is None:
        yield "Its beginning is no longer kept: what follows is about its last steps."
    total_s = history.end_s - history.start_s
    facts["total_ms"] = to_ms(total_s)
    state = f"It ended ({status.value.replace('_', ' ')})" if status and history.is_over else "It is not over"
    came = "came here" if history.num_resumed_tokens else "came"
    yield f"{state}, {to_text(total_s)} after it {came}, with {to_count(len(history.own), 'step')}."
    if history.num_beams:
        facts["beams"] = history.num_beams
        yield f"It was a beam search: {to_count(history.num_beams, 'beam')} had a part in these steps."
    if history.num_resumed_tokens:
        facts["resumed_tokens"] = history.num_resumed_tokens
        tokens = to_count(history.num_resumed_tokens, "token")
        yield f"Another engine core had generated {tokens} of its answer before: what follows is of the time since."


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
    others = {row.request_id for record in steps for row in history.others(record)}
    facts["queue_steps"], facts["queued_behind_requests"] = len(steps), len(others)
    heaviest = _heaviest(history, steps)
    if heaviest is not None and 2 * heaviest[1] >= sum(map(num_tokens_of, steps)):
        facts["queued_behind"], facts["queued_behind_tokens"] = heaviest
        yield f"Most of what was computed meanwhile, {to_count(heaviest[1], 'prompt token')}, was of {heaviest[0]}."
    elif others:
        name, num_steps = _longest(history, steps)
        facts["queued_behind"] = name
        # A decode gets a token in each step, so that their number is a length.
        most = name if name == FOREIGN else f"{name} in {to_count(num_steps, 'step')}"
        yield f"Meanwhile {to_count(len(others), 'other request')} had a part in the steps, most of all {most}."


def _cause(history: History, limits: Limits, steps: Sequence[StepRecord], row: ScheduledRequest) -> tuple[str, str]:
    """What kept it from the steps for most of the time."""
    if len(steps) == 1:
        return "step", f"it came during step {steps[0].stats.step}, which took {to_text(duration_of(steps[0]))}"
    places, budget, need = limits.max_num_seqs, limits.max_num_batched_tokens, len(row.new_block_ids)
    is_shown = not history.is_foreign(one.request_id for record in steps for one in history.others(record))
    free = f"{min(one.stats.num_free_blocks for one in steps)} were" if is_shown else "fewer were"
    cause_to_sentence = {
        "places": f"all {places} places of a step were taken",
        "blocks": f"{to_count(need, 'block')} of the KV cache were needed and {free} free",
        "token budget": f"others used all {budget} tokens of each step",
        "others": "others were ahead of it",
    }
    cause_to_seconds = dict.fromkeys(cause_to_sentence, 0.0)
    for record in steps[1:]:  # it came during the first one
        # Those that ended with a step are no longer among the running ones.
        if places is not None and max(record.stats.num_running, len(record.rows)) >= places:
            cause = "places"
        elif record.stats.num_free_blocks < need:
            cause = "blocks"
        elif budget is not None and num_tokens_of(record) >= budget:
            cause = "token budget"
        else:
            cause = "others"
        cause_to_seconds[cause] += duration_of(record)
    cause = max(cause_to_seconds, key=cause_to_seconds.__getitem__)
    return cause, f"{cause_to_sentence[cause]}, and {len(steps)} steps were computed before its first one"


def _longest(history: History, steps: Sequence[StepRecord]) -> tuple[str, int]:
    """The other request with the most of some steps."""
    counts = Counter(row.request_id for record in steps for row in history.others(record))
    ((request_id, num_steps),) = counts.most_common(1)
    return history.name_of(request_id), num_steps


def _heaviest(history: History, steps: Sequence[StepRecord]) -> tuple[str, int] | None:
    """The other request with the most tokens of prompts in some steps."""
    tokens: Counter[str] = Counter()
    for record in steps:
        for row in history.others(record):
            tokens[row.request_id] += num_prefill_tokens([row])
    request_id, num_tokens = max(tokens.items(), key=lambda pair: pair[1], default=("", 0))
    return (history.name_of(request_id), history.shown_tokens(num_tokens, [request_id])) if num_tokens else None


def _prefix_cache(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    if not history.own or history.queued_s is None:
        return
    num_cached = history.num_cached_tokens
    num_prompt = num_cached + sum(row.num_scheduled_tokens for _, row in history.prefill)
    facts["prompt_tokens"], facts["cached_tokens"] = num_prompt - history.num_resumed_tokens, num_cached
    what = "its prompt and these" if history.num_resumed_tokens else "its prompt"
    if num_cached:
        yield f"The prefix cache held {num_cached} of the {num_prompt} tokens of {what}."
    else:
        yield f"The prefix cache held nothing of {what} of {to_count(num_prompt, 'token')}."


def _prefill(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    if not history.own or history.queued_s is None:
        return
    end_s = end_of(history.prefill[-1][0])
    seconds = end_s - history.prefill[0][0].start_s
    facts["prefill_steps"], facts["prefill_ms"] = len(history.prefill), to_ms(seconds)
    facts["ttft_ms"] = to_ms(end_s - history.start_s)
    rows = [row for record, _ in history.prefill for row in history.others(record)]
    others = [row for row in rows if row.request_id not in history.siblings]
    num_others = history.shown_tokens(num_prefill_tokens(others), (row.request_id for row in others))
    beside = f", beside {num_others} tokens of other prompts" if num_others else ""
    num_siblings = num_prefill_tokens([row for row in rows if row.request_id in history.siblings])
    beside += f"{', and' if beside else ', beside'} {num_siblings} of the same answer" if num_siblings else ""
    steps = "one step" if len(history.prefill) == 1 else f"{len(history.prefill)} steps"
    rest = "What it did not hold" if history.num_resumed_tokens else "The rest of its prompt"
    yield f"{rest} was computed in {steps} of {to_text(seconds)}{beside}."


def _decodes(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    decodes = history.decodes
    if not decodes:
        return
    alone = [duration_of(record) for record, _ in decodes if not num_prefill_tokens(history.others(record))]
    longer = [(record, duration_of(record)) for record, _ in decodes if num_prefill_tokens(history.others(record))]
    total_s = sum(duration_of(record) for record, _ in decodes)
    facts["decode_steps"], facts["decode_ms"] = len(decodes), to_ms(total_s)
    num_drafts = sum(len(row.draft_token_ids) for _, row in decodes)
    drafted = f", with {to_count(num_drafts, 'drafted token')} to verify" if num_drafts else ""
    together = " together" if len(decodes) > 1 else ""
    yield f"It decoded in {to_count(len(decodes), 'step')} of {to_text(total_s)}{together}{drafted}."
    if alone and longer:
        usual_s = median(alone)
        lost_s = sum(max(0.0, seconds - usual_s) for _, seconds in longer)
        facts["slowed_steps"], facts["slowed_ms"] = len(longer), to_ms(lost_s)
        if not _is_worth_a_sentence(lost_s, total_s):
            return
        heaviest = _heaviest(history, [record for record, _ in longer])
        blame = f", the longest of {heaviest[0]}" if heaviest else ""
        yield (
            f"{len(longer)} of these steps also computed prompts of other requests{blame}. That took "
            f"{to_text(lost_s)} more than {to_count(len(longer), 'step')} without any."
        )


def _preemptions(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    events = [event for event in history.events if event.status in PREEMPTIONS]
    facts["preemptions"] = len(events)
    for event in events:
        before = [row for record, row in history.own if record.start_s < event.time_s]
        after = next(((record, row) for record, row in history.own if record.start_s >= event.time_s), None)
        takers = [record for record in history.steps if end_of(record) > event.time_s + CLOCK_S][:1]
        taker = _taker(history, takers)
        who = f" since {taker} needed blocks" if taker else " since no block of the KV cache was free"
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


def _spans(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """The parts of its time, which add up to the whole, and sentences on those that no other one covers."""
    if not history.own or history.queued_s is None:
        return
    first_s = history.own[0][0].start_s
    prompt_s = sum(duration_of(record) for record, _ in history.prefill)
    decode_s = sum(duration_of(record) for record, _ in history.decodes)
    pauses = _pauses(history)
    preempted_s = sum(max(0.0, until_s - since_s) for since_s, until_s in pauses)
    own = {id(record) for record, _ in history.own}
    passed_s = sum(
        duration_of(record)
        for record in history.steps_between(first_s, history.end_s)
        if id(record) not in own and not any(since_s <= record.start_s < until_s for since_s, until_s in pauses)
    )
    known_s = (first_s - history.start_s) + prompt_s + decode_s + preempted_s
    between_s = max(0.0, history.end_s - history.start_s - known_s)
    passed_s = min(passed_s, between_s)
    spans = {
        "before_queue": history.queued_s - history.start_s,
        "queue": first_s - history.queued_s,
        "prompt": prompt_s,
        "decodes": decode_s,
        "preempted": preempted_s,
        "steps_of_others": passed_s,
        "between_steps": between_s - passed_s,
    }
    facts["spans_ms"] = {name: to_ms(seconds) for name, seconds in spans.items()}
    total_s = history.end_s - history.start_s
    if _is_worth_a_sentence(passed_s, total_s):
        yield f"It had no part in steps of others for {to_text(passed_s)}, though it was running."
    if _is_worth_a_sentence(between_s - passed_s, total_s):
        yield (
            f"Between its steps {to_text(between_s - passed_s)} passed: the engine core handled messages, or the "
            "processor was busy with other work."
        )


def _pauses(history: History) -> list[tuple[float, float]]:
    """From when to when it was preempted."""
    starts = [record.start_s for record, _ in history.own]
    return [
        (event.time_s, next((start_s for start_s in starts if start_s >= event.time_s), history.end_s))
        for event in history.events
        if event.status in PREEMPTIONS
    ]


def _is_worth_a_sentence(seconds: float, of_s: float) -> bool:
    return seconds >= max(MIN_SECONDS, MIN_SHARE * of_s)


def _alone(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """An estimate of the same steps without other requests."""
    fitted = _fit(history.steps)
    if fitted is None or not history.own or history.queued_s is None or history.num_beams:
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


def to_ms(seconds: float) -> float:
    return round(1000 * seconds, 1)


def to_count(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def to_text(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
