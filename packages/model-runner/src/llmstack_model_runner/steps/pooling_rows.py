"""Pooling parameters of the persistent rows, and partial results of their prompts."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_types import PoolingParams, PoolingTask

_NOWHERE = np.iinfo(np.int64).max


class PoolingRows:
    """Pooling parameters by row. A row is set when a request arrives and cleared when it is removed.

    Attributes:
        is_pooling: Whether each row pools instead of sampling. [max_num_rows]
        second_text_start: Start of the second text in each row's prompt; beyond any prompt if there is none.
        num_pairs: Number of rows with a second text.
        row_to_params: Parameters of the rows that pool.
        row_to_partial: Partial results of incomplete prompts: float32 [hidden_size], or [num_prompt_tokens,
            hidden_size] for token vectors.
    """

    def __init__(self, max_num_rows: int) -> None:
        """Allocates `max_num_rows` rows without requests."""
        self.is_pooling = np.zeros(max_num_rows, dtype=np.bool_)
        self.second_text_start = np.full(max_num_rows, _NOWHERE, dtype=np.int64)
        self.num_pairs = 0
        self.row_to_partial: dict[int, torch.Tensor] = {}
        self.row_to_params: dict[int, PoolingParams] = {}

    def set_row(self, row: int, params: PoolingParams) -> None:
        """Sets a row to a request's parameters."""
        self.is_pooling[row] = True
        if params.second_text_start is not None:
            self.second_text_start[row] = params.second_text_start
            self.num_pairs += 1
        self.row_to_params[row] = params

    def clear_row(self, row: int) -> None:
        """Removes the parameters of a row, if it has any."""
        params = self.row_to_params.pop(row, None)
        if params is None:
            return
        self.is_pooling[row] = False
        self.row_to_partial.pop(row, None)
        if params.second_text_start is not None:
            self.second_text_start[row] = _NOWHERE
            self.num_pairs -= 1

    @property
    def has_alignments(self) -> bool:
        """Whether a row asks how its tokens attend to sound; O(rows that pool)."""
        return any(params.task is PoolingTask.ALIGNMENT for params in self.row_to_params.values())

    def params(self, row: int) -> PoolingParams | None:
        """The parameters of a row; None if it does not pool."""
        return self.row_to_params.get(row)
