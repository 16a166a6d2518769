"""Largest steps: the most tokens and the most sampling rows, for memory profiling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
"""Bound on the tokens of all decode rows together, which limits the time for creating token lists."""
# Parameters that make the sampler hold several copies of the logits at once.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, seed=0)
_POOLING = PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED)


def largest_steps(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, *, is_generative: bool = True
) -> Iterator[SchedulerOutput]:
    """A decode of the maximum number of rows, a prefill of the maximum number of tokens, and the removal of both.

    The decode comes first, since its graph keeps memory that a prefill in service cannot use.

    All rows share block 0, since the values that they write and read are not used.
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


def num_positions(steps: Iterable[SchedulerOutput]) -> int:
    """Positions that the rows of the steps have at most."""
    rows = (row for step in steps for row in step.scheduled_requests)
    return max(row.num_computed_tokens + row.num_scheduled_tokens for row in rows)


def _lengths(num_tokens: int, num_rows: int, max_model_len: int) -> list[int]:
    """Lengths of nearly equal prompts with `num_tokens` tokens together."""
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
