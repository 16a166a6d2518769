"""Bidirectional attention by PyTorch's own kernel.

There is one call for each run of neighbouring rows with the same length.

No row is padded, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from llmstack_kernels.bidirectional_attention.runs import pieces


def bidirectional_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_start_loc_list: Sequence[int], scale: float,
    first_query: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Query, key, value and result have the shape [num_tokens, num_heads, head_dim]."""
    out = torch.empty_like(query)
    for query_start, key_start, num_rows, num_queries, length in pieces(query_start_loc_list, first_query, len(query)):
        queries = slice(query_start, query_start + num_rows * num_queries)
        keys = slice(key_start, key_start + num_rows * length)
        q, k, v = (_as_batch(tensor, num_rows) for tensor in (query[queries], key[keys], value[keys]))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale)
        out[queries] = attended.transpose(1, 2).flatten(0, 1)
    return out


def _as_batch(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows * length, num_heads, head_dim] to [num_rows, num_heads, length, head_dim]."""
    return tensor.view(num_rows, -1, *tensor.shape[1:]).transpose(1, 2)
