"""Steps of made-up requests, so that the first real one finds everything compiled, packed and mapped."""

from __future__ import annotations

from collections.abc import Iterator

from llmstack_types import (
    EngineStartError,
    ModelRunnerOutput,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenMasks,
)

_PREFIX = "warm-up-"
_MAX_PREFILL_TOKENS = 64
_NUM_DECODES = 2

MASKED_STEP = 2
"""The second decode, to be computed with masks: kernels for those are not to be compiled amid a constrained request."""


def warm_up_steps(
    num_blocks: int, block_size: int, max_num_tokens: int, max_num_rows: int
) -> Iterator[SchedulerOutput]:
    """A prefill of up to two rows, greedy and random, two decodes of both, and a step that removes them.

    The first blocks of the storage are overwritten. `max_num_tokens` bounds a step as well as a request.
    """
    num_rows = min(2, max_num_rows, num_blocks, max_num_tokens // 2)
    if num_rows < 1:
        return
    blocks_per_row = num_blocks // num_rows
    room = min(max_num_tokens // num_rows, blocks_per_row * block_size) - _NUM_DECODES
    num_tokens = min(_MAX_PREFILL_TOKENS, room)
    if num_tokens < 1:
        return
    request_ids = [f"{_PREFIX}{index}" for index in range(num_rows)]
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=0)]
    num_row_blocks = -(-(num_tokens + _NUM_DECODES) // block_size)
    block_ids = [list(range(index * num_row_blocks, (index + 1) * num_row_blocks)) for index in range(num_rows)]
    yield SchedulerOutput(
        step=0,
        new_requests=[
            NewRequest(request_id, [0] * num_tokens, num_tokens, params[index])
            for index, request_id in enumerate(request_ids)
        ],
        scheduled_requests=[
            ScheduledRequest(request_id, 0, num_tokens, block_ids[index])
            for index, request_id in enumerate(request_ids)
        ],
        total_num_scheduled_tokens=num_rows * num_tokens,
    )
    for index in range(_NUM_DECODES):
        rows = [ScheduledRequest(request_id, num_tokens + index, 1, []) for request_id in request_ids]
        yield SchedulerOutput(step=1 + index, scheduled_requests=rows, total_num_scheduled_tokens=num_rows)
    yield SchedulerOutput(step=1 + _NUM_DECODES, removed_request_ids=request_ids)


def allow_all(step: SchedulerOutput, vocab_size: int) -> TokenMasks:
    """Masks of a step's rows that bar nothing."""
    request_ids = [row.request_id for row in step.scheduled_requests]
    return TokenMasks(request_ids, bytearray(b"\xff" * (-(-vocab_size // 32) * 4 * len(request_ids))))


def check_warm_up(output: ModelRunnerOutput) -> None:
    """EngineStartError if not even a made-up request could be computed; why not is in the log."""
    if output.errors:
        error = next(iter(output.errors.values()))
        raise EngineStartError(
            f"the model cannot compute its first step: {error}; where that is memory, lower --gpu-memory-utilization, "
            "--kv-cache-memory-bytes, --num-kv-blocks or --max-num-batched-tokens"
        )
