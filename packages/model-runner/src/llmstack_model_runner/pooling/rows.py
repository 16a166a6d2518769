"""Pooling parameters of the persistent rows, and what the chunks of their prompts have brought so far."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_types import PoolingParams

_NOWHERE = np.iinfo(np.int64).max


class PoolingRows:
    """Pooling parameters by row; a row is set when a request arrives and cleared when it leaves.

    Attributes:
        is_pooling: Which rows bring a vector instead of tokens. [max_num_rows]
        second_text_start: Where the second text of each row's prompt begins; beyond any prompt if it has none.
        num_pairs: How many rows have one.
        row_to_partial: What the rows in the midst of their prompts have gathered: float32 [hidden_size], or
            [num_prompt_tokens, hidden_size] of a vector for each token.
    """

    def __init__(self, max_num_rows: int) -> None:
        """Makes room for `max_num_rows` rows."""
        self.is_pooling = np.zeros(max_num_rows, dtype=np.bool_)
        self.second_text_start = np.full(max_num_rows, _NOWHERE, dtype=np.int64)
        self.num_pairs = 0
        self.row_to_partial: dict[int, torch.Tensor] = {}
        self._row_to_params: dict[int, PoolingParams] = {}

    def __len__(self) -> int:
        return len(self._row_to_params)

    def set_row(self, row: int, params: PoolingParams) -> None:
        """Takes over a request's parameters."""
        self.is_pooling[row] = True
        if params.second_text_start is not None:
            self.second_text_start[row] = params.second_text_start
            self.num_pairs += 1
        self._row_to_params[row] = params

    def clear_row(self, row: int) -> None:
        """Forgets a row's request, if it was a pooling one."""
        params = self._row_to_params.pop(row, None)
        if params is None:
            return
        self.is_pooling[row] = False
        self.row_to_partial.pop(row, None)
        if params.second_text_start is not None:
            self.second_text_start[row] = _NOWHERE
            self.num_pairs -= 1

    def params(self, row: int) -> PoolingParams | None:
        """The parameters of a row; None for a completion."""
        return self._row_to_params.get(row)
