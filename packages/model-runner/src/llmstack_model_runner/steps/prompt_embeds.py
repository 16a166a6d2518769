"""Prompts that are vectors in place of tokens."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.steps.input_batch import InputBatch, InputBatchError, StepRows


def find_vectors(
    batch: InputBatch, step: StepRows, size: int, dtype: torch.dtype, device: torch.device
) -> StepVectors | None:
    """The vectors of the step's tokens, where a row has some; O(rows).

    Raises:
        InputBatchError: A row has fewer vectors than its prompt has tokens, or more.
    """
    places: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []
    starts, counts = step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()
    first_tokens = (np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens).tolist()
    for index, row in enumerate(step.rows.tolist()):
        data = batch.prompt_embeds.get(row)
        num_prompt_tokens = int(batch.num_prompt_tokens[row])
        if data is None or starts[index] >= num_prompt_tokens:
            continue
        if len(data) != num_prompt_tokens * size * dtype.itemsize:
            raise InputBatchError(f"request {step.request_ids[index]!r} has not one vector for each prompt token")
        num_vectors = min(starts[index] + counts[index], num_prompt_tokens) - starts[index]
        whole = torch.frombuffer(data, dtype=dtype).view(num_prompt_tokens, size)
        vectors.append(whole[starts[index] : starts[index] + num_vectors])
        places.append(torch.arange(first_tokens[index], first_tokens[index] + num_vectors))
    return StepVectors(torch.cat(places).to(device), torch.cat(vectors).to(device)) if places else None
