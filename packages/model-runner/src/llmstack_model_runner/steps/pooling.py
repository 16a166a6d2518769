"""Pooling: from hidden states of prompt chunks to vectors and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.models.heads import NO_HEADS, Heads
from llmstack_model_runner.models.label_head import LabelHead
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.pooling_rows import PoolingRows
from llmstack_model_runner.steps.prepare_inputs import ModelInputs
from llmstack_types import PoolingParams, PoolingTask, PoolingType

Align = Callable[[slice], torch.Tensor]
"""From tokens of a row to the numbers of each."""
BAD_VECTOR = "the model gave no usable embedding"
_SMALLEST_LENGTH = 1e-12
"""Minimum length that a vector is divided by, as in PyTorch's `normalize`."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Pooled values of requests whose prompts a step has completed, on the device and all of one shape."""

    request_ids: list[str]
    params: list[PoolingParams]
    values: torch.Tensor  # float32 [num_requests, hidden_size | num_labels], or [1, num_tokens, hidden_size]

    def to_bytes(self) -> tuple[dict[str, bytes], dict[str, str]]:
        """Request id to its values as little-endian float32, and request id to its error."""
        finished, errors = {}, {}
        for request_id, params, numbers in zip(self.request_ids, self.params, self.values.cpu().numpy(), strict=True):
            if np.isfinite(numbers).all():
                finished[request_id] = _finish(numbers, params).astype("<f4").tobytes()
            else:
                errors[request_id] = BAD_VECTOR
        return finished, errors


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The part of one row's prompt that a step computes."""

    hidden: torch.Tensor  # [num_scheduled_tokens, hidden_size]
    start: int
    num_prompt_tokens: int

    @property
    def end(self) -> int:
        return self.start + len(self.hidden)

    @property
    def is_last(self) -> bool:
        return self.end == self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class _Complete:
    """A row whose prompt the step has completed."""

    request_id: str
    params: PoolingParams
    states: torch.Tensor  # float32 [hidden_size], or [num_prompt_tokens, hidden_size]


def pool(
    batch: InputBatch,
    step: StepRows,
    inputs: ModelInputs,
    hidden: torch.Tensor,
    heads: Heads = NO_HEADS,
    align: Align | None = None,
) -> list[PooledRows]:
    """Adds a step's hidden states to the rows that pool, and returns the values of complete rows.

    `hidden` has the states of all tokens of the step: [num_tokens, hidden_size]. `align` gives the numbers of tokens
    under `ALIGNMENT`.

    Raises:
        ValueError: A row that needs the whole prompt did not start at its first token, or a row needs labels of a model
            that has none.
    """
    complete = []
    for index, row in enumerate(step.rows.tolist()):
        params = batch.pooling.params(row)
        if params is None:
            continue
        first, end = inputs.query_start_loc[index : index + 2].tolist()
        tokens = slice(first, end)
        is_aligned = params.task is PoolingTask.ALIGNMENT
        numbers = align(tokens) if align is not None and is_aligned else hidden[tokens]
        chunk = _Chunk(numbers, int(step.num_computed_tokens[index]), int(batch.num_prompt_tokens[row]))
        states = _take(batch.pooling, row, params, chunk)
        if states is not None:
            complete.append(_Complete(step.request_ids[index], params, states))
    return list(_group(complete, heads))


def _group(complete: list[_Complete], heads: Heads) -> Iterator[PooledRows]:
    """Groups rows of one shape, which share the call of the head and the copy to the host."""
    labelled = [one for one in complete if one.params.task is PoolingTask.CLASSIFY]
    for one in complete:
        if _is_per_token(one.params):
            yield PooledRows([one.request_id], [one.params], _of_tokens(one, heads)[None])
    vectors = [one for one in complete if not (_is_per_token(one.params) or one.params.task is PoolingTask.CLASSIFY)]
    if vectors:
        rows = _stack(vectors)
        yield rows if heads.vectors is None else replace(rows, values=heads.vectors(rows.values))
    if labelled:
        rows = _stack(labelled)
        is_activated = [params.use_activation is not False for params in rows.params]
        yield replace(rows, values=_present(heads.labels)(rows.values, is_activated))


def _of_tokens(one: _Complete, heads: Heads) -> torch.Tensor:
    """The vectors of a row's tokens, or the numbers of their labels."""
    if one.params.task is PoolingTask.TOKEN_EMBED and heads.tokens is not None:
        return heads.tokens(one.states)
    if one.params.task is not PoolingTask.TOKEN_CLASSIFY:
        return one.states
    return _present(heads.labels)(one.states, [one.params.use_activation is not False] * len(one.states))


def _present(head: LabelHead | None) -> LabelHead:
    if head is None:
        raise ValueError("a row asks for labels, but the model has none")
    return head


def _is_per_token(params: PoolingParams) -> bool:
    return params.task is not None and params.task.is_per_token


def _stack(complete: list[_Complete]) -> PooledRows:
    return PooledRows(
        [one.request_id for one in complete],
        [one.params for one in complete],
        torch.stack([one.states for one in complete]),
    )


def _take(rows: PoolingRows, row: int, params: PoolingParams, chunk: _Chunk) -> torch.Tensor | None:
    """The row's states if the chunk is its prompt's last."""
    if not params.needs_whole_prompt:
        return chunk.hidden[-1].float() if chunk.is_last else None
    before = rows.row_to_partial.get(row)
    if (before is None) != (chunk.start == 0):
        raise ValueError(f"pooling needs the whole prompt, but the row started at token {chunk.start}")
    partial = _gather(params, chunk, before)
    if not chunk.is_last:
        rows.row_to_partial[row] = partial
        return None
    if params.pooling_type is PoolingType.MEAN:
        return partial / chunk.num_prompt_tokens
    if params.pooling_type is PoolingType.WEIGHTED_MEAN:
        return partial / (chunk.num_prompt_tokens * (chunk.num_prompt_tokens + 1) / 2)
    return partial


def _gather(params: PoolingParams, chunk: _Chunk, before: torch.Tensor | None) -> torch.Tensor:
    if _is_per_token(params):
        size = (chunk.num_prompt_tokens, chunk.hidden.shape[1])
        states = chunk.hidden.new_empty(size, dtype=torch.float32) if before is None else before
        states[chunk.start : chunk.end] = chunk.hidden
        return states
    if params.pooling_type is PoolingType.MAX:
        largest = chunk.hidden.float().amax(0)
        return largest if before is None else torch.maximum(before, largest)
    if params.pooling_type is PoolingType.WEIGHTED_MEAN:
        weights = torch.arange(chunk.start + 1, chunk.end + 1, device=chunk.hidden.device)
        weighted = (chunk.hidden.float() * weights[:, None]).sum(0)
        return weighted if before is None else before + weighted
    if params.pooling_type is PoolingType.MEAN:
        # Each row separately, so that the order of a sum depends on the row's own chunks only.
        total = chunk.hidden.float().sum(0)
        return total if before is None else before + total
    if params.pooling_type is not PoolingType.CLS:
        raise ValueError(f"pooling type {params.pooling_type} is not resolved")
    return chunk.hidden[0].float().clone() if before is None else before  # a view would keep all states of the step


def _finish(numbers: npt.NDArray[np.float32], params: PoolingParams) -> npt.NDArray[np.float32]:
    if params.task is not None and not params.task.gives_vectors:
        return numbers
    vectors = numbers[..., : params.dimensions]
    if params.normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), _SMALLEST_LENGTH)
    return vectors
