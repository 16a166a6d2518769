"""The steps that need the most memory: as many tokens, and as many rows that sample, as there can be."""

from __future__ import annotations

from collections.abc import Iterator

from llmstack_types import (
    NewRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

_PREFIX = "profile-"
_MAX_CONTEXT_TOKENS = 1 << 20
"""Of all rows of the decode together, which bounds the time that lists of made-up tokens take."""
# All that makes the sampler keep logits in several forms at once.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, seed=0)
_POOLING = PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED)


def largest_steps(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, *, is_generative: bool = True
) -> Iterator[SchedulerOutput]:
    """A decode of as many contexts as may run, a prefill of all tokens that ends as many prompts, and their removal.

    The decode comes first: what it is recorded in is kept, and in service a prefill finds no room there.

    All rows share block 0, so the storage needs no other: what they write and read there means nothing.
    """
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    removed: list[str] = []
    if is_generative:
        context = max(1, min(max_model_len, _MAX_CONTEXT_TOKENS // num_rows))
        yield _step(0, [context - 1] * num_rows, [1] * num_rows, block_size, is_generative)
        removed = [f"{_PREFIX}0-{index}" for index in range(num_rows)]
    lengths = _lengths(max_num_batched_tokens, num_rows, max_model_len)
    yield _step(1, [0] * len(lengths), lengths, block_size, is_generative, removed)
    yield SchedulerOutput(step=2, removed_request_ids=[f"{_PREFIX}1-{index}" for index in range(len(lengths))])


def _lengths(num_tokens: int, num_rows: int, max_model_len: int) -> list[int]:
    """Prompts of nearly equal length that together have as many tokens as may be."""
    each, rest = divmod(num_tokens, num_rows)
    return [min(each + (index < rest), max_model_len) for index in range(num_rows)]


def _step(
    number: int,
    starts: list[int],
    lengths: list[int],
    block_size: int,
    is_generative: bool,
    removed: list[str] | None = None,
) -> SchedulerOutput:
    new, scheduled = [], []
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        request_id, end = f"{_PREFIX}{number}-{index}", start + length
        pooling_params = None if is_generative else _POOLING
        new.append(NewRequest(request_id, [0] * end, end, _SAMPLING, pooling_params=pooling_params))
        scheduled.append(ScheduledRequest(request_id, start, length, [0] * -(-end // block_size)))
    return SchedulerOutput(number, new, scheduled, removed or [], sum(lengths))
