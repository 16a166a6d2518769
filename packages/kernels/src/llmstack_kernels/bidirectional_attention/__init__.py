"""Bidirectional attention: each token attends to its whole row, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

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

    The queries are those of all tokens, or of some that follow each other: the first is that of token `first_query`.
    """
    if key.shape != value.shape or query.shape[1:] != key.shape[1:]:
        raise ValueError(f"query, key and value must have one shape, got {query.shape}, {key.shape}, {value.shape}.")
    if query_start_loc_list[-1] != key.shape[0]:
        raise ValueError(f"rows of {query_start_loc_list[-1]} tokens do not fit {key.shape[0]} keys.")
    if first_query < 0 or first_query + query.shape[0] > key.shape[0]:
        raise ValueError(f"{query.shape[0]} queries from {first_query} on are not among {key.shape[0]} tokens.")
    out: torch.Tensor = implementation("bidirectional_attention", query.device.type).bidirectional_attention(
        query, key, value, query_start_loc_list, scale, first_query
    )
    return out
