"""Bidirectional attention: each token attends to its whole row, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.dispatch import implementation


def bidirectional_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    query_start_loc_list: Sequence[int],  # [num_rows + 1]
    scale: float,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Softmax of the scaled scores over each row's own tokens, times their values."""
    if not query.shape == key.shape == value.shape:
        raise ValueError(f"query, key and value must have one shape, got {query.shape}, {key.shape}, {value.shape}.")
    if query_start_loc_list[-1] != query.shape[0]:
        raise ValueError(f"rows of {query_start_loc_list[-1]} tokens do not fit a query of {query.shape[0]}.")
    out: torch.Tensor = implementation("bidirectional_attention", query.device.type).bidirectional_attention(
        query, key, value, query_start_loc_list, scale
    )
    return out
