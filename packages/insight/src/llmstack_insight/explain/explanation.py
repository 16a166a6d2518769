"""Sentences on where the time of a request went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from llmstack_engine_client.prediction.cost_model import LinearCostModel, fit_cost_model, step_work
from llmstack_engine_client.prediction.errors import SimulationError
from llmstack_insight.explain.beams import join_beams
from llmstack_insight.explain.history import (
    FOREIGN,
    PREEMPTIONS,
    History,
    UnknownRequestError,
    duration_of,
    end_of,
    num_prefill_tokens,
)
from llmstack_insight.explain.items import items
from llmstack_insight.explain.sessions import session
from llmstack_insight.explain.waits import Limits, heaviest, preparation, queue
from llmstack_insight.explain.wording import to_count, to_end, to_ms, to_text
from llmstack_types import RequestEvent, RequestStatus, StepRecord, StepRecording

# A cost model that is further off than this is no estimate.
MAX_ERROR = 0.5
MIN_STEPS_TO_FIT = 8
# Less time than this part of the whole, and than this many seconds, needs no sentence.
MIN_SHARE = 0.05
MIN_SECONDS = 0.001
MAX_PARTS = 64
END_MARGIN_S = 0.01
# Times of a log are whole microseconds.
CLOCK_S = 1e-6
NO_STEPS = "Its steps are no longer kept: a step log may have them (--log)."

__all__ = ["Explanation", "Limits", "UnknownRequestError", "add_parts", "explain"]


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
    for part in _PARTS:
        made.sentences.extend(part(history, limits or Limits(), made.facts))
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
    state = f"It ended ({to_end(status)})" if status and history.is_over else "It is not over"
    if history.arrived_s is None and not history.own:
        yield f"{state}. {NO_STEPS}"
        return
    if history.arrived_s is None:
        yield "Its beginning is no longer kept: what follows is about its last steps."
    total_s = history.end_s - history.start_s
    facts["total_ms"] = to_ms(total_s)
    came = "came here" if history.num_resumed_tokens or history.earlier_s else "came"
    yield f"{state}, {to_text(total_s)} after it {came}{_steps(history, facts)}"
    if history.num_beams:
        facts["beams"] = history.num_beams
        yield f"It was a beam search: {to_count(history.num_beams, 'beam')} had a part in these steps."
    yield from _earlier(history, facts)


def _steps(history: History, facts: dict[str, Any]) -> str:
    """The end of a sentence: how many steps it had, or how many of them are left."""
    if not history.lacks_first_step:
        return f", with {to_count(len(history.own), 'step')}."
    facts["kept_steps"] = len(history.own)
    if not history.own:
        return f". {NO_STEPS}"
    return f". Its first steps are no longer kept: what follows is of the last {len(history.own)}."


def _earlier(history: History, facts: dict[str, Any]) -> Iterator[str]:
    """Sentences on the work of another engine core, which has ended or given the request away."""
    earlier_s, num_tokens = history.earlier_s, history.num_resumed_tokens
    passed = f"It had come {to_text(earlier_s)} before, to another engine core" if earlier_s else ""
    if earlier_s:
        facts["earlier_ms"] = to_ms(earlier_s)
    if num_tokens:
        facts["resumed_tokens"] = num_tokens
        tokens = to_count(num_tokens, "token")
        what = f"{passed}, which generated" if passed else "Another engine core had generated"
        yield f"{what} {tokens} of its answer{'' if passed else ' before'}: what follows is of the time since."
    elif passed:
        yield f"{passed}: what follows is of the time since."


def _prefix_cache(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    if not history.has_beginning:
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
    if not history.has_beginning:
        return
    end_s = min(end_of(history.prefill[-1][0]), history.end_s)
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
    total_s = sum(history.seconds_of(record) for record, _ in decodes)
    facts["decode_steps"], facts["decode_ms"] = len(decodes), to_ms(total_s)
    drafted = _drafts(history, facts)
    together = " together" if len(decodes) > 1 else ""
    yield f"It decoded in {to_count(len(decodes), 'step')} of {to_text(total_s)}{together}{drafted}."
    if alone and longer:
        usual_s = median(alone)
        lost_s = sum(max(0.0, seconds - usual_s) for _, seconds in longer)
        facts["slowed_steps"], facts["slowed_ms"] = len(longer), to_ms(lost_s)
        if not _is_worth_a_sentence(lost_s, total_s):
            return
        prompt = heaviest(history, [record for record, _ in longer])
        blame = f", the longest of {prompt[0]}" if prompt else ""
        yield (
            f"{len(longer)} of these steps also computed prompts of other requests{blame}. That took "
            f"{to_text(lost_s)} more than {to_count(len(longer), 'step')} without any."
        )


def _drafts(history: History, facts: dict[str, Any]) -> str:
    """A sentence on the tokens that were drafted, and on the right ones, as the step after each says."""
    rows = [row for _, row in history.decodes]
    num_drafts = sum(len(row.draft_token_ids) for row in rows)
    if not num_drafts or history.num_beams:
        return ""
    num_accepted = 0
    for row, following in pairwise(rows):
        num_drafted = len(row.draft_token_ids)
        num_certain = row.num_computed_tokens + row.num_scheduled_tokens - num_drafted
        num_accepted += min(max(following.num_computed_tokens - num_certain, 0), num_drafted)
    facts["draft_tokens"], facts["accepted_draft_tokens"] = num_drafts, num_accepted
    spared = f"{num_accepted or 'none'} of them spared a step{' each' if num_accepted > 1 else ''}"
    return f", with {to_count(num_drafts, 'drafted token')} to verify: {spared}"


def _preemptions(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    events = [event for event in history.events if event.status in PREEMPTIONS]
    facts["preemptions"] = len(events)
    num_forgotten = sum(event.time_s < history.kept_since_s for event in events)
    if num_forgotten:
        yield f"It was preempted {to_count(num_forgotten, 'time')} in steps that are no longer kept."
    for event in events[num_forgotten:]:
        before = [row for record, row in history.own if record.start_s < event.time_s]
        after = next(((record, row) for record, row in history.own if record.start_s >= event.time_s), None)
        why = _why_preempted(history, event, facts)
        if after is None:
            yield f"It was preempted {why}, and has not gone on yet."
            continue
        lost_s = after[0].start_s - event.time_s
        facts["preempted_ms"] = facts.get("preempted_ms", 0.0) + to_ms(lost_s)
        known = before[-1].num_computed_tokens + before[-1].num_scheduled_tokens if before else 0
        again = max(0, known - after[1].num_computed_tokens)
        facts["recomputed_tokens"] = facts.get("recomputed_tokens", 0) + again
        computed = f", and {again} of its tokens were computed again" if again else ""
        copied = ""
        if event.status is RequestStatus.SWAPPED:
            facts["swaps"] = facts.get("swaps", 0) + 1
            copied = ", its blocks were copied to the host's memory"
        yield f"It was preempted {why}{copied}: it went on after {to_text(lost_s)}{computed}."


def _why_preempted(history: History, event: RequestEvent, facts: dict[str, Any]) -> str:
    """Whether it lost its row for a place or for blocks, and to which request."""
    if event.status is RequestStatus.YIELDED:
        facts["yielded_places"] = facts.get("yielded_places", 0) + 1
        return f"to give a place to {FOREIGN}"
    takers = [record for record in history.steps if end_of(record) > event.time_s + CLOCK_S][:1]
    taker = _taker(history, takers)
    return f"since {taker} needed blocks" if taker else "since no block of the KV cache was free"


def _taker(history: History, steps: Sequence[StepRecord]) -> str | None:
    """The other request that got the most blocks in some steps."""
    blocks: Counter[str] = Counter()
    for record in steps:
        for row in history.others(record):
            blocks[row.request_id] += len(row.new_block_ids)
    request_id, count = max(blocks.items(), key=lambda pair: pair[1], default=("", 0))
    return history.name_of(request_id) if count else None


def _spans(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """The parts of its time, which add up to the whole, and sentences on the time between them."""
    queued_s = history.queued_s
    if queued_s is None or not history.has_beginning:
        return
    first_s = history.first_s
    prompt_s = sum(history.seconds_of(record) for record, _ in history.prefill)
    decode_s = sum(history.seconds_of(record) for record, _ in history.decodes)
    encoder_s = sum(map(history.seconds_of, history.encoder_steps))
    pauses = _pauses(history)
    preempted_s = sum(max(0.0, until_s - since_s) for since_s, until_s in pauses)
    own = {id(record) for record in (*(record for record, _ in history.own), *history.encoder_steps)}
    passed_s = sum(
        history.seconds_of(record)
        for record in history.steps_between(first_s, history.end_s)
        if id(record) not in own and not any(since_s <= record.start_s < until_s for since_s, until_s in pauses)
    )
    known_s = (first_s - history.start_s) + prompt_s + decode_s + preempted_s + encoder_s
    between_s = max(0.0, history.end_s - history.start_s - known_s)
    passed_s = min(passed_s, between_s)
    spans = {
        "before_queue": queued_s - history.start_s,
        "queue": first_s - queued_s,
        "encoder": encoder_s,
        "prompt": prompt_s,
        "decodes": decode_s,
        "preempted": preempted_s,
        "steps_of_others": passed_s,
        "between_steps": between_s - passed_s,
    }
    total_s = history.end_s - history.start_s
    facts["spans_ms"] = _rounded(spans, to_ms(total_s))
    if _is_worth_a_sentence(passed_s, total_s):
        yield f"It had no part in steps of others for {to_text(passed_s)}, though it was running."
    if _is_worth_a_sentence(between_s - passed_s, total_s):
        yield (
            f"Between its steps {to_text(between_s - passed_s)} passed: the engine core handled messages, or the "
            "processor was busy with other work."
        )


def _rounded(spans: Mapping[str, float], total_ms: float) -> dict[str, float]:
    """Milliseconds whose sum is the whole: the longest part takes what rounding leaves over."""
    rounded = {name: to_ms(seconds) for name, seconds in spans.items()}
    longest = max(rounded, key=rounded.__getitem__)
    rounded[longest] = round(total_ms - sum(ms for name, ms in rounded.items() if name != longest), 1)
    return rounded


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


def _deadline(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """A sentence on whether the request met the deadline of its client."""
    given_s = history.note_of(history.request_id).given_s
    if not given_s or history.arrived_s is None:
        return
    facts["deadline_ms"] = to_ms(given_s)
    total_s = history.end_s - history.start_s + history.earlier_s
    # A log has the end of an aborted request with the step before it.
    margin_s = END_MARGIN_S + max((duration_of(record) for record, _ in history.own), default=0.0)
    if history.is_over and history.status is not RequestStatus.FINISHED_ABORTED and total_s <= given_s:
        facts["deadline"] = "met"
        yield f"It met its deadline of {to_text(given_s)}."
    elif total_s > given_s or (history.is_over and total_s > given_s - margin_s):
        facts["deadline"] = "missed"
        yield missed_deadline(given_s)
    elif history.is_over:
        yield f"It was aborted before its deadline of {to_text(given_s)}."


def missed_deadline(given_s: float) -> str:
    """The sentence on a deadline that was not met."""
    return f"It missed its deadline of {to_text(given_s)}."


def _alone(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """An estimate of the same steps without other requests."""
    fitted = _fit(history.steps)
    if fitted is None or not history.has_beginning or history.num_beams:
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
    plain = [record for record in steps if record.rows and not record.encoder_work]
    measured = [(step_work(record.rows), duration_of(record)) for record in plain]
    measured = [(work, seconds) for work, seconds in measured if seconds > 0]
    if len(measured) < MIN_STEPS_TO_FIT:
        return None
    try:
        model = fit_cost_model(measured)
    except SimulationError:
        return None
    error = median(abs(model.step_s(work) - seconds) / seconds for work, seconds in measured)
    return (model, error) if error <= MAX_ERROR else None


# In the order of time, then what is about the whole.
_PARTS = (
    _state, preparation, queue, _prefix_cache, session, items, _prefill, _decodes, _preemptions, _spans, _deadline,
    _alone,
)  # fmt: skip
