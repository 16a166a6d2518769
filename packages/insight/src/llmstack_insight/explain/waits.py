"""Sentences on what a request waited for before its first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack_insight.explain.history import FOREIGN, History, duration_of, num_prefill_tokens, num_tokens_of
from llmstack_insight.explain.wording import to_count, to_ms, to_text
from llmstack_types import RequestStatus, ScheduledRequest, StepRecord


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step; None where they are not known, or where there are none."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_loras: int | None = None
    max_prefill_tokens: int | None = None


def preparation(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
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


def queue(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """The wait for its first step: how long, why, and behind which request."""
    queued_s = history.queued_s
    if queued_s is None:
        return
    if history.lacks_first_step and history.begun_s is not None:
        facts["queue_ms"] = to_ms(history.begun_s - queued_s)
        yield f"It was queued for {to_text(history.begun_s - queued_s)}. The cause is no longer known."
        return
    if not history.own:
        yield "It was in no step." if history.is_over else "It has not been in a step yet."
        return
    first, row = history.own[0]
    waited_s = max(0.0, history.first_s - queued_s)
    facts["queue_ms"] = to_ms(waited_s)
    steps = history.steps_between(queued_s, min(record.start_s for record in (first, *history.encoder_steps)))
    if not steps:
        yield f"It was queued for {to_text(waited_s)}: no step was being computed."
        return
    cause, sentence = _cause(history, limits, steps, row)
    facts["queue_cause"] = cause
    yield f"It was queued for {to_text(waited_s)}: {sentence}."
    forgotten_s = _forgotten_s(history, queued_s)
    if forgotten_s:
        facts["queue_forgotten_ms"] = to_ms(forgotten_s)
        yield f"This is of the steps that are still kept: those of its first {to_text(forgotten_s)} in it are not."
    others = {row.request_id for record in steps for row in history.others(record)}
    facts["queue_steps"], facts["queued_behind_requests"] = len(steps), len(others)
    prompt = heaviest(history, steps)
    if prompt is not None and 2 * prompt[1] >= sum(map(num_tokens_of, steps)):
        facts["queued_behind"], facts["queued_behind_tokens"] = prompt
        yield f"Most of what was computed meanwhile, {to_count(prompt[1], 'prompt token')}, was of {prompt[0]}."
    elif others:
        name, num_steps = _longest(history, steps)
        facts["queued_behind"] = name
        # A decode gets a token in each step, so that their number is a length.
        most = name if name == FOREIGN else f"{name} in {to_count(num_steps, 'step')}"
        yield f"Meanwhile {to_count(len(others), 'other request')} had a part in the steps, most of all {most}."


def _forgotten_s(history: History, queued_s: float) -> float:
    """The part of its wait before the first step that is kept; 0 where that is the first of all."""
    oldest = history.steps[0]
    return max(0.0, oldest.start_s - queued_s) if oldest.stats.step > 1 else 0.0


def _cause(history: History, limits: Limits, steps: Sequence[StepRecord], row: ScheduledRequest) -> tuple[str, str]:
    """The cause that kept the request from the steps for most of the time."""
    if len(steps) == 1:
        return "step", f"it came during step {steps[0].stats.step}, which took {to_text(duration_of(steps[0]))}"
    places, budget, need = limits.max_num_seqs, limits.max_num_batched_tokens, len(row.new_block_ids)
    prefill, num_tokens = limits.max_prefill_tokens, row.num_scheduled_tokens
    adapter = history.note_of(history.request_id).lora_name
    is_shown = not history.is_foreign(one.request_id for record in steps for one in history.others(record))
    free = f"{min(one.stats.num_free_blocks for one in steps)} were" if is_shown else "fewer were"
    cause_to_sentence = {
        "places": "the only place of a step was taken" if places == 1 else f"all {places} places of a step were taken",
        "adapters": f"all places for adapters were taken by others (--max-loras {limits.max_loras})",
        "blocks": f"{to_count(need, 'block')} of the KV cache were needed and {free} free",
        "token budget": f"others used all {budget} tokens of each step",
        "prefill tokens": f"prompts of others left no room for its own (--max-prefill-tokens {prefill})",
        "encoder": "the encoder was at work for others (--encoder-budget-units)",
        "others": "others were ahead of it",
    }
    own_items = {number for number, _ in history.media}
    cause_to_seconds = dict.fromkeys(cause_to_sentence, 0.0)
    for record in steps[1:]:  # it came during the first one
        # Those that ended with a step are no longer among the running ones.
        if places is not None and max(record.stats.num_running, len(record.rows)) >= places:
            cause = "places"
        elif adapter and limits.max_loras and len(history.adapters(record) - {adapter}) >= limits.max_loras:
            cause = "adapters"
        elif record.stats.num_free_blocks < need:
            cause = "blocks"
        elif budget is not None and num_tokens_of(record) >= budget:
            cause = "token budget"
        elif prefill and 0 < prefill - num_tokens < num_prefill_tokens(history.others(record)):
            cause = "prefill tokens"
        elif own_items and any(part.media_id not in own_items for part in record.encoder_work):
            cause = "encoder"
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


def heaviest(history: History, steps: Sequence[StepRecord]) -> tuple[str, int] | None:
    """The other request with the most tokens of prompts in some steps."""
    tokens: Counter[str] = Counter()
    for record in steps:
        for row in history.others(record):
            tokens[row.request_id] += num_prefill_tokens([row])
    request_id, num_tokens = max(tokens.items(), key=lambda pair: pair[1], default=("", 0))
    return (history.name_of(request_id), history.shown_tokens(num_tokens, [request_id])) if num_tokens else None
