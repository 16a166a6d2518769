"""Bidirectional attention: each token attends to its whole row, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from llmstack_kernels.dispatch import implementation


def bidirectional_attention(
    query: torch.Tensor,  # [num_queries, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    query_start_loc_list: Sequence[int],  # [num_rows + 1]
    scale: float,
    first_query: int = 0,
) -> torch.Tensor:  # [num_queries, num_heads, head_dim]
    """Softmax of the scaled scores over each row's own tokens, times their values.

    `query_start_loc_list`: The first token of each row, and the end. Rows are crops, windows or texts.

    The queries are those of all tokens, or of some that follow each other: the first is that of token `first_query`.
    """
    if key.shape != value.shape or query.shape[1:] != key.shape[1:]:
        raise ValueError(f"query, key and value must have one shape, got {query.shape}, {key.shape}, {value.shape}.")
    starts = query_start_loc_list
    if starts[0] or starts[-1] != key.shape[0] or any(end < start for start, end in pairwise(starts)):
        raise ValueError(f"rows from {starts[0]} to {starts[-1]} do not fit {key.shape[0]} keys one after the other.")
    if first_query < 0 or first_query + query.shape[0] > key.shape[0]:
        raise ValueError(f"{query.shape[0]} queries from {first_query} on are not among {key.shape[0]} tokens.")
    out: torch.Tensor = implementation("bidirectional_attention", query.device.type).bidirectional_attention(
        query, key, value, query_start_loc_list, scale, first_query
    )
    return out
