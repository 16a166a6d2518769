"""Prompts that are vectors in place of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmstack_model_runner.layers import Embedding
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.input_batch import InputBatch, InputBatchError, StepRows

Replaced = tuple[torch.Tensor, torch.Tensor]
"""Places in a step's tokens, and the vectors that these have: [num_places] int64 and [num_places, size]."""


def find_vectors(
    batch: InputBatch, step: StepRows, query_start_loc: IntArray, size: int, dtype: torch.dtype
) -> Replaced | None:
    """The vectors of the step's tokens, where a row has some; O(rows).

    Raises:
        InputBatchError: A row has fewer vectors than its prompt has tokens, or more.
    """
    places: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []
    starts, counts = step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()
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
        first = int(query_start_loc[index])
        places.append(torch.arange(first, first + num_vectors))
    return (torch.cat(places), torch.cat(vectors)) if places else None


@contextmanager
def replacing(table: Embedding | None, replaced: Replaced | None) -> Iterator[None]:
    """A forward pass in the `with` block has these vectors."""
    if table is None or replaced is None:
        yield
        return
    table.replaced = replaced
    try:
        yield
    finally:
        table.replaced = None
