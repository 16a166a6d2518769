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
)

_PREFIX = "warm-up-"
_MAX_PREFILL_TOKENS = 64


def warm_up_steps(
    num_blocks: int, block_size: int, max_num_tokens: int, max_num_rows: int
) -> Iterator[SchedulerOutput]:
    """A prefill of up to two rows, greedy and random, a decode of both, and a step that removes them.

    The first blocks of the storage are overwritten. `max_num_tokens` bounds a step as well as a request.
    """
    num_rows = min(2, max_num_rows, num_blocks, max_num_tokens // 2)
    if num_rows < 1:
        return
    blocks_per_row = num_blocks // num_rows
    num_tokens = min(_MAX_PREFILL_TOKENS, max_num_tokens // num_rows - 1, blocks_per_row * block_size - 1)
    if num_tokens < 1:
        return
    request_ids = [f"{_PREFIX}{index}" for index in range(num_rows)]
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9, seed=0)]
    num_row_blocks = -(-(num_tokens + 1) // block_size)
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
    yield SchedulerOutput(
        step=1,
        scheduled_requests=[ScheduledRequest(request_id, num_tokens, 1, []) for request_id in request_ids],
        total_num_scheduled_tokens=num_rows,
    )
    yield SchedulerOutput(step=2, removed_request_ids=request_ids)


def check_warm_up(output: ModelRunnerOutput) -> None:
    """EngineStartError if not even a made-up request could be computed; why not is in the log."""
    if output.errors:
        error = next(iter(output.errors.values()))
        raise EngineStartError(
            f"the model cannot compute its first step: {error}; where that is memory, lower --gpu-memory-utilization, "
            "--kv-cache-memory-bytes, --num-kv-blocks or --max-num-batched-tokens"
        )
