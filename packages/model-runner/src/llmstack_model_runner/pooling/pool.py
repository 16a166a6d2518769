"""Takes the hidden states of a step's pooling rows, chunk by chunk, to the vectors of those whose prompts it ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.input_batch import InputBatch, StepRows
from llmstack_model_runner.pooling.rows import PoolingRows
from llmstack_model_runner.prepare_inputs import ModelInputs
from llmstack_types import PoolingParams, PoolingType

BAD_VECTOR = "the model gave no usable embedding"
_SMALLEST_LENGTH = 1e-12
"""A shorter vector keeps its direction out of all proportion; PyTorch's `normalize` stops here too."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Vectors of the requests whose prompts a step has completed, on the device still."""

    request_ids: list[str]
    params: list[PoolingParams]
    vectors: torch.Tensor  # [num_vectors, hidden_size] float32

    def to_bytes(self) -> tuple[dict[str, bytes], dict[str, str]]:
        """Request id to its finished vector, float32 and little-endian; and to what went wrong with it."""
        vectors, errors = {}, {}
        for request_id, params, vector in zip(self.request_ids, self.params, self.vectors.cpu().numpy(), strict=True):
            if np.isfinite(vector).all():
                vectors[request_id] = _finish(vector, params).astype("<f4").tobytes()
            else:
                errors[request_id] = BAD_VECTOR
        return vectors, errors


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The part of one row's prompt that a step computes."""

    hidden: torch.Tensor  # [num_scheduled_tokens, hidden_size]
    start: int
    num_prompt_tokens: int

    @property
    def is_last(self) -> bool:
        return self.start + len(self.hidden) == self.num_prompt_tokens


def pool(batch: InputBatch, step: StepRows, inputs: ModelInputs, hidden: torch.Tensor) -> PooledRows | None:
    """Adds the step to the rows that pool; the vectors of those that are complete, None if there are none.

    `hidden` is that of all tokens of the step: [num_tokens, hidden_size].

    Raises:
        ValueError: A row began behind the prompt's first token though its vector needs all of them.
    """
    pooled: list[tuple[str, PoolingParams, torch.Tensor]] = []
    for index, row in enumerate(step.rows.tolist()):
        params = batch.pooling.params(row)
        if params is None:
            continue
        first, end = inputs.query_start_loc[index : index + 2].tolist()
        chunk = _Chunk(hidden[first:end], int(step.num_computed_tokens[index]), int(batch.num_prompt_tokens[row]))
        vector = _take(batch.pooling, row, params.pooling_type, chunk)
        if vector is not None:
            pooled.append((step.request_ids[index], params, vector))
    if not pooled:
        return None
    request_ids, all_params, vectors = zip(*pooled, strict=True)
    return PooledRows(list(request_ids), list(all_params), torch.stack(vectors))


def _take(rows: PoolingRows, row: int, kind: PoolingType | None, chunk: _Chunk) -> torch.Tensor | None:
    """The row's vector if the chunk is its prompt's last: float32 [hidden_size]."""
    if kind is PoolingType.LAST:
        return chunk.hidden[-1].float() if chunk.is_last else None
    before = rows.row_to_partial.get(row)
    if (before is None) != (chunk.start == 0):
        raise ValueError(f"a vector by {kind} pooling needs the whole prompt, but token {chunk.start} came first")
    partial = _gather(kind, chunk, before)
    if not chunk.is_last:
        rows.row_to_partial[row] = partial
        return None
    return partial / chunk.num_prompt_tokens if kind is PoolingType.MEAN else partial


def _gather(kind: PoolingType | None, chunk: _Chunk, before: torch.Tensor | None) -> torch.Tensor:
    if kind is PoolingType.MEAN:
        # Each row by itself: the order of a sum then depends on the row's own chunks only.
        total = chunk.hidden.float().sum(0)
        return total if before is None else before + total
    if kind is not PoolingType.CLS:
        raise ValueError(f"pooling type {kind} is not resolved")
    return chunk.hidden[0].float().clone() if before is None else before  # a view would keep the step's states alive


def _finish(vector: npt.NDArray[np.float32], params: PoolingParams) -> npt.NDArray[np.float32]:
    vector = vector[: params.dimensions]
    if params.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _SMALLEST_LENGTH)
    return vector
