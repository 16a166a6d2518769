"""Warm-up steps, which compile kernels and allocate memory at the start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from llmstack_model_runner.progress_bar import with_progress
from llmstack_types import (
    EngineStartError,
    KVCacheGroupSpec,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequest,
    PoolingParams,
    PoolingTask,
    PoolingType,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenMasks,
)
from llmstack_types.token_masks import NO_DRAFTS_MADE, MakeTokenMasks

_PREFIX = "warm-up-"
_MAX_PREFILL_TOKENS = {"cuda": 64, "cpu": 4}
"""Tokens of a warm-up prompt. On a GPU larger steps have kernels of their own. On a CPU nothing is compiled, and a
start has to compute them: with 16 in place of 4 the warm-up of Llama 1.1B takes 0.5 s, not 0.2, and the first request
takes as long."""
_NUM_DECODES = 2
_POOLING_ID = "warm-up"

_MASKED_STEP = 2
"""The second decode, which is computed with masks, so that their kernels are compiled before the first request."""


def warm_up(spec: KVCacheSpec, num_blocks: int, max_num_tokens: int, max_num_rows: int) -> Iterator[SchedulerOutput]:
    """The warm-up steps of a model, for its groups of layers; the others of this module say what the sizes mean."""
    sizes = (num_blocks, spec.block_size, max_num_tokens)
    if spec.is_generative:
        steps = warm_up_steps(*sizes, max_num_rows, spec.device)
    else:
        steps = pooling_warm_up_steps(*sizes, spec.device)
    return for_groups(steps, spec.table_groups, has_states=spec.state_group is not None)


def warm_up_steps(
    num_blocks: int, block_size: int, max_num_tokens: int, max_num_rows: int, device_type: str
) -> Iterator[SchedulerOutput]:
    """A prefill of up to two rows, greedy and random, two decodes of both, and a step that removes them.

    The first blocks of the storage are overwritten. `max_num_tokens` bounds a step as well as a request.
    """
    num_rows = min(2, max_num_rows, num_blocks, max_num_tokens // 2)
    if num_rows < 1:
        return
    blocks_per_row = num_blocks // num_rows
    room = min(max_num_tokens // num_rows, blocks_per_row * block_size) - _NUM_DECODES
    num_tokens = min(_MAX_PREFILL_TOKENS[device_type], room)
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


def pooling_warm_up_steps(
    num_blocks: int, block_size: int, max_num_tokens: int, device_type: str
) -> Iterator[SchedulerOutput]:
    """One prompt that is pooled, and the step that removes it. `max_num_tokens` bounds a step as well as a request."""
    num_tokens = min(_MAX_PREFILL_TOKENS[device_type], max_num_tokens, num_blocks * block_size)
    no_tokens = SamplingParams(temperature=0.0, max_tokens=0, seed=0)
    pooling_params = PoolingParams(PoolingType.MEAN, normalize=True, task=PoolingTask.EMBED)
    request = NewRequest(_POOLING_ID, [0] * num_tokens, num_tokens, no_tokens, pooling_params=pooling_params)
    block_ids = list(range(-(-num_tokens // block_size)))
    yield SchedulerOutput(0, [request], [ScheduledRequest(_POOLING_ID, 0, num_tokens, block_ids)], [], num_tokens)
    yield SchedulerOutput(1, removed_request_ids=[_POOLING_ID])


def for_groups(
    steps: Iterable[SchedulerOutput], groups: Sequence[KVCacheGroupSpec], *, has_states: bool = False
) -> Iterator[SchedulerOutput]:
    """The same made-up steps for groups of layers; all write to the same blocks, whose content means nothing.

    With states every row begins with the one before the first token, and each writes one of its own.

    A terminal shows how many are done.
    """
    steps = list(steps)
    for step in with_progress("warm up", steps, len(steps)):
        rows = [
            row._replace(new_block_ids=[block_id for block_id in row.new_block_ids for _ in groups or (None,)])
            for row in step.scheduled_requests
        ]
        states = [(0, 1 + index) for index in range(len(rows))] if has_states else []
        yield replace(step, scheduled_requests=rows, states=states)


def masked(step: SchedulerOutput, vocab_size: int) -> MakeTokenMasks | None:
    """The maker of masks for the warm-up step that is computed with some, which allow all tokens; else None."""
    return partial(_allow_all, step, vocab_size) if step.step == _MASKED_STEP else None


def _allow_all(
    step: SchedulerOutput, vocab_size: int, drafts_made: Mapping[str, Sequence[int]] = NO_DRAFTS_MADE, /
) -> TokenMasks:
    request_ids = [row.request_id for row in step.scheduled_requests]
    return TokenMasks(request_ids, bytearray(b"\xff" * (-(-vocab_size // 32) * 4 * len(request_ids))))


def check_warm_up(output: ModelRunnerOutput) -> None:
    """Raises EngineStartError if a warm-up request failed; the log has the reason."""
    if output.errors:
        error = next(iter(output.errors.values()))
        raise EngineStartError(
            f"the model cannot compute its first step: {error}; if memory is short, lower --gpu-memory-utilization, "
            "--kv-cache-memory-bytes, --num-kv-blocks or --max-num-batched-tokens"
        )
