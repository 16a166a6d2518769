"""End of a prompt's match with the prefix cache, and its cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from llmstack_insight.explain.explanation import Explanation
from llmstack_insight.explain.history import FOREIGN
from llmstack_insight.explain.wording import to_ms, to_text
from llmstack_step_log import Run
from llmstack_step_log.control_plane import CacheConfig
from llmstack_types import EngineCoreRequest, StepRecord, StepRecording

_PREFIX_CACHE = "The prefix cache held "
# Tokens before the one where prompts part, which are the same in both, and characters of each text.
NUM_BEFORE = 8
MAX_CHARACTERS = 80
# Prompts that one is compared with, the latest before it; it bounds the time in a long log.
MAX_COMPARED = 8192

TextOf = Callable[[Sequence[int]], str]
"""Token ids to text."""


class _Shared(NamedTuple):
    """The earlier request whose prompt shares the longest beginning."""

    request: EngineCoreRequest
    num_tokens: int

    @property
    def request_id(self) -> str:
        """The id of that request."""
        return self.request.request_id


def add_prefix_match(
    made: Explanation, run: Run, log: StepRecording, cache: CacheConfig, text_of: TextOf | None = None
) -> None:
    """Adds where the match ended: where prompts part, or at a block that another request got when it was evicted.

    It names requests and positions, and no tokens without `text_of`.

    `log`: The steps of the run that are kept.
    `text_of`: Adds the tokens and the text where prompts part; of the other prompt only if it is of the same tenant.
    """
    own_rows = [(record, row) for record in log.steps for row in record.rows if row.request_id == made.request_id]
    if not own_rows or "cached_tokens" not in made.facts or not cache.enable_prefix_caching:
        return
    request, shared, num_compared = _most_alike(run, made.request_id)
    if request is None:
        return
    num_cached, size = made.facts["cached_tokens"], cache.block_size
    num_prompt = len(request.prompt_token_ids)
    if num_cached >= (num_prompt - 1) // size * size:
        return  # all that the cache can hold: it has whole blocks, and never the last token
    if shared is None or shared.num_tokens < size:
        which = "No earlier prompt" if num_compared is None else f"None of the {num_compared} prompts before it"
        sentence = f"{which} has the same first {min(size, num_prompt)} tokens, which are one block."
    elif shared.num_tokens // size * size <= num_cached:
        made.facts["parts_at"], made.facts["parted_from"] = shared.num_tokens, shared.request_id
        sentence = (
            f"The match ended where its prompt parts from that of {shared.request_id}, at token {shared.num_tokens}."
        )
        if text_of is not None:
            sentence = f"{sentence} {_parting(made.facts, request, shared, text_of)}"
    elif cache.num_state_blocks:
        made.facts["shared_with"], made.facts["shared_tokens"] = shared.request_id, shared.num_tokens
        sentence = (
            f"Its first {shared.num_tokens} tokens are also those of {shared.request_id}, but at no block boundary "
            f"after token {num_cached} were its blocks and a state found."
        )
    else:
        steps = [record for record in log.steps if record.start_s <= own_rows[0][0].start_s]
        alike = (shared.request_id, shared.num_tokens)
        sentence = _lost(made.facts, steps, alike, size, bool(cache.sliding_windows), str)
    insert_on_prefix(made, sentence)


def insert_on_prefix(made: Explanation, sentence: str) -> None:
    """Puts a sentence after the one on the prefix cache."""
    position = next((i for i, one in enumerate(made.sentences) if one.startswith(_PREFIX_CACHE)), len(made.sentences))
    made.sentences.insert(position + 1, sentence)


def add_lost_block(
    made: Explanation, log: StepRecording, alike: tuple[str, int], block_size: int, is_shown: Callable[[str], bool]
) -> None:
    """Adds why a block was not found that an earlier request had computed, in a running server.

    `alike`: The earlier request, and how many tokens at the beginning of both prompts are the same.
    `is_shown`: Whether the reader may know the id of another request.
    """
    began_s = next(
        (one.start_s for one in log.steps if any(row.request_id == made.request_id for row in one.rows)), None
    )
    if began_s is None:
        return
    steps = [record for record in log.steps if record.start_s <= began_s]

    def name_of(other: str) -> str:
        return other if is_shown(other) else FOREIGN

    insert_on_prefix(made, _lost(made.facts, steps, alike, block_size, False, name_of))


def _most_alike(run: Run, request_id: str) -> tuple[EngineCoreRequest | None, _Shared | None, int | None]:
    """The request, and the earlier one with the longest common beginning of their prompts; the later of equal ones.

    Last comes how many it was compared with, where that is not all.
    """
    requests, are_all = run.requests_up_to(request_id, MAX_COMPARED + 1)
    if not requests:
        return None, None, None
    *others, request = requests
    best: _Shared | None = None
    for other in others:
        if (other.cache_salt, other.lora_name) != (request.cache_salt, request.lora_name):
            continue
        num_tokens = _num_common(other.prompt_token_ids, request.prompt_token_ids)
        if num_tokens and (best is None or num_tokens >= best.num_tokens):
            best = _Shared(other, num_tokens)
    return request, best, None if are_all else len(others)


def _num_common(ones: Sequence[int], others: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ones, others, strict=False)))


def _parting(facts: dict[str, Any], request: EngineCoreRequest, shared: _Shared, text_of: TextOf) -> str:
    """The tokens and the text where two prompts part."""
    at = shared.num_tokens
    before = _shown(request.prompt_token_ids[max(0, at - NUM_BEFORE) : at], text_of)
    facts["text_before"] = before
    own = _token_at(facts, "own", request, at, text_of)
    if shared.request.tenant != request.tenant:
        return f"After {before!r} it has {own}; the other prompt is of another key, and is not shown."
    other = _token_at(facts, "other", shared.request, at, text_of)
    return f"After {before!r} it has {own}, and {shared.request_id} has {other}."


def _token_at(facts: dict[str, Any], whose: str, request: EngineCoreRequest, at: int, text_of: TextOf) -> str:
    if at >= len(request.prompt_token_ids):
        return "its end"
    token_id = request.prompt_token_ids[at]
    facts[f"{whose}_token"], facts[f"{whose}_text"] = token_id, _shown([token_id], text_of)
    return f"token {token_id}, {facts[f'{whose}_text']!r}"


def _shown(token_ids: Sequence[int], text_of: TextOf) -> str:
    return text_of(token_ids)[-MAX_CHARACTERS:]


def _lost(
    facts: dict[str, Any],
    before: Sequence[StepRecord],
    alike: tuple[str, int],
    size: int,
    has_windows: bool,
    name_of: Callable[[str], str],
) -> str:
    """A sentence about the block at which the match ended, though an earlier prompt goes on alike.

    `before`: The steps up to the first one of the request.
    """
    name, num_tokens = alike
    facts["shared_with"], facts["shared_tokens"] = name, num_tokens
    same = f"Its first {num_tokens} tokens are also those of {name}"
    index = facts["cached_tokens"] // size
    number = _computed_in(before, name, (index + 1) * size)
    if number is None or has_windows:
        has_begun = any(row.request_id == name for record in before for row in record.rows)
        return (
            f"{same}, which had not computed the next block yet." if has_begun else f"{same}, whose blocks were gone."
        )
    table = [block_id for record in before[: number + 1] for row in record.rows if row.request_id == name
             for block_id in row.new_block_ids]  # fmt: skip
    taken = _next_owner(before[:-1], number, table[index], size) if index < len(table) else None
    if taken is None:
        return f"{same}, whose next block was no longer cached."
    record, taker = taken
    ago_s = before[-1].start_s - record.start_s
    facts["evicted_for"], facts["evicted_ms_before"] = name_of(taker), to_ms(ago_s)
    return f"{same}: the next block of these was evicted {to_text(ago_s)} before it began, for {name_of(taker)}."


def _computed_in(steps: Sequence[StepRecord], request_id: str, num_tokens: int) -> int | None:
    """The position of the step that computed so many tokens of a request."""
    for number, record in enumerate(steps):
        for row in record.rows:
            if row.request_id == request_id and row.num_computed_tokens + row.num_scheduled_tokens >= num_tokens:
                return number
    return None


def _next_owner(
    steps: Sequence[StepRecord], number: int, block_id: int, block_size: int
) -> tuple[StepRecord, str] | None:
    """The first row after step `number` that got the block to write to, and did not find it in the cache."""
    ends: dict[str, int] = {}
    for position, record in enumerate(steps):
        for row in record.rows:
            request_id, num_computed, num_scheduled, block_ids, _ = row
            # A request that begins, or goes on after a preemption, gets a whole table: found blocks come first.
            num_found = num_computed // block_size if num_computed != ends.get(request_id) else 0
            ends[request_id] = num_computed + num_scheduled
            if position > number and block_id in block_ids[num_found:]:
                return record, request_id
    return None
