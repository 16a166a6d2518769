"""Pooling of prompts by a runner, without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_types import (
    ModelRunnerOutput,
    NewRequest,
    PoolingParams,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)

NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, seed=0)


def pool_prompts(
    runner: ModelRunner,
    prompts: Mapping[str, tuple[Sequence[int], PoolingParams]],
    *,
    chunk_size: int | None = None,
    blocks_per_row: int = 8,
) -> dict[str, npt.NDArray[np.float32]]:
    """Numbers of each prompt, all of them in one batch, in chunks of that many tokens; the rows are gone afterwards.

    Raises:
        ValueError: A prompt failed.
    """
    new = [
        NewRequest(name, list(token_ids), len(token_ids), NO_TOKENS, pooling_params=params)
        for name, (token_ids, params) in prompts.items()
    ]
    num_computed = dict.fromkeys(prompts, 0)
    found: dict[str, bytes] = {}
    while rows := _rows(new, num_computed, chunk_size, blocks_per_row):
        is_first = not any(num_computed.values())
        output = _step(runner, new if is_first else [], rows)
        if output.errors:
            raise ValueError(str(output.errors))
        found |= output.pooled
        for row in rows:
            num_computed[row.request_id] += row.num_scheduled_tokens
    runner.execute_model(SchedulerOutput(0, removed_request_ids=list(prompts))).result()
    return {name: np.frombuffer(numbers, dtype="<f4") for name, numbers in found.items()}


def _rows(
    requests: Sequence[NewRequest], num_computed: Mapping[str, int], chunk_size: int | None, blocks_per_row: int
) -> list[ScheduledRequest]:
    rows = []
    for place, request in enumerate(requests):
        start = num_computed[request.request_id]
        num_tokens = min(chunk_size or request.num_prompt_tokens, request.num_prompt_tokens - start)
        if num_tokens:
            block_ids = [] if start else [*range(place * blocks_per_row, (place + 1) * blocks_per_row)]
            rows.append(ScheduledRequest(request.request_id, start, num_tokens, block_ids))
    return rows


def _step(runner: ModelRunner, new: list[NewRequest], rows: list[ScheduledRequest]) -> ModelRunnerOutput:
    total = sum(row.num_scheduled_tokens for row in rows)
    return runner.execute_model(SchedulerOutput(0, new, rows, [], total)).result()
