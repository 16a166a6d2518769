"""Bidirectional attention by PyTorch's own kernel.

There is one call for each run of neighbouring rows with the same length.

No row is padded, so that a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F


def bidirectional_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_start_loc_list: Sequence[int], scale: float,
    first_query: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Query, key, value and result have the shape [num_tokens, num_heads, head_dim]."""
    if len(query) < len(key):
        return _some_queries(query, key, value, query_start_loc_list, scale, first_query)
    out = torch.empty_like(query)
    for start, num_rows, length in runs_of_one_length(query_start_loc_list):
        end = start + num_rows * length
        q, k, v = (_as_batch(tensor[start:end], num_rows) for tensor in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale)
        out[start:end] = attended.transpose(1, 2).flatten(0, 1)
    return out


def _some_queries(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: Sequence[int], scale: float, first: int
) -> torch.Tensor:
    out = torch.empty_like(query)
    row = bisect_right(starts, first) - 1
    begin, end = first, first + len(query)
    while begin < end:
        stop = min(starts[row + 1], end)
        own = slice(begin - first, stop - first)
        keys = slice(starts[row], starts[row + 1])
        q, k, v = (_as_batch(tensor, 1) for tensor in (query[own], key[keys], value[keys]))
        out[own] = F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)
        begin, row = stop, row + 1
    return out


def runs_of_one_length(query_start_loc_list: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First token, number of rows and their length, of each run of neighbouring rows that are equally long."""
    start = 0
    for length, rows in groupby(end - begin for begin, end in pairwise(query_start_loc_list)):
        num_rows = len(list(rows))
        yield start, num_rows, length
        start += num_rows * length


def _as_batch(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows * length, num_heads, head_dim] to [num_rows, num_heads, length, head_dim]."""
    return tensor.view(num_rows, -1, *tensor.shape[1:]).transpose(1, 2)
