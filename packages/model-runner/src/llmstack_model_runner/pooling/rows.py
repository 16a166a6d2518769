"""Pooling parameters of the persistent rows, and what the chunks of their prompts have brought so far."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_types import PoolingParams


class PoolingRows:
    """Pooling parameters by row; a row is set when a request arrives and cleared when it leaves.

    Attributes:
        is_pooling: Which rows bring a vector instead of tokens. [max_num_rows]
        row_to_partial: What the rows in the midst of their prompts have gathered: float32 [hidden_size].
    """

    def __init__(self, max_num_rows: int) -> None:
        """Makes room for `max_num_rows` rows."""
        self.is_pooling = np.zeros(max_num_rows, dtype=np.bool_)
        self.row_to_partial: dict[int, torch.Tensor] = {}
        self._row_to_params: dict[int, PoolingParams] = {}

    def __len__(self) -> int:
        return len(self._row_to_params)

    def set_row(self, row: int, params: PoolingParams) -> None:
        """Takes over a request's parameters."""
        self.is_pooling[row] = True
        self._row_to_params[row] = params

    def clear_row(self, row: int) -> None:
        """Forgets a row's request, if it was a pooling one."""
        if self._row_to_params.pop(row, None) is not None:
            self.is_pooling[row] = False
            self.row_to_partial.pop(row, None)

    def params(self, row: int) -> PoolingParams | None:
        """The parameters of a row; None for a completion."""
        return self._row_to_params.get(row)
