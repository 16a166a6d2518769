"""A step of made-up prompts for a model that only pools."""

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

_REQUEST_ID = "warm-up"
_MAX_TOKENS = 64


def pooling_warm_up_steps(num_blocks: int, block_size: int, max_num_tokens: int) -> Iterator[SchedulerOutput]:
    """One prompt that is pooled, and the step that removes it. `max_num_tokens` bounds a step as well as a request."""
    num_tokens = min(_MAX_TOKENS, max_num_tokens, num_blocks * block_size)
    no_tokens = SamplingParams(temperature=0.0, max_tokens=0, seed=0)
    pooling_params = PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED)
    request = NewRequest(_REQUEST_ID, [0] * num_tokens, num_tokens, no_tokens, pooling_params=pooling_params)
    block_ids = list(range(-(-num_tokens // block_size)))
    yield SchedulerOutput(0, [request], [ScheduledRequest(_REQUEST_ID, 0, num_tokens, block_ids)], [], num_tokens)
    yield SchedulerOutput(1, removed_request_ids=[_REQUEST_ID])
