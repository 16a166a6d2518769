"""Bidirectional attention in native code.

A query's result is bit-equal whichever rows, heads and other queries share the call, and with any number of threads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from llmstack_kernels.bidirectional_attention import reference
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Pointer, require_library

_ARGUMENTS = struct.Struct("=15qd")  # as `RowsCall` in native.cpp, without the starts
_FUNCTIONS = {dtype: f"bidirectional_attention_{suffix}" for dtype, suffix in DTYPE_TO_SUFFIX.items()}


def bidirectional_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_start_loc_list: Sequence[int], scale: float,
    first_query: int = 0,
) -> torch.Tensor:  # fmt: skip
    """One native call for all rows; types that it has not, and scales of 0 or less, go through the reference."""
    num_queries, num_heads, head_dim = query.shape
    is_known = query.dtype in DTYPE_TO_SUFFIX and query.dtype == key.dtype == value.dtype
    if not is_known or not scale > 0:
        return reference.bidirectional_attention(query, key, value, query_start_loc_list, scale, first_query)
    query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
    strides = [tensor.stride() for tensor in (query, key, value)]
    out = query.new_empty((num_queries, num_heads, head_dim))
    arguments = _ARGUMENTS.pack(
        out.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        *(step for stride in strides for step in stride[:2]),
        first_query,
        num_queries,
        num_heads,
        head_dim,
        len(query_start_loc_list) - 1,
        scale,
    ) + struct.pack(f"={len(query_start_loc_list)}q", *query_start_loc_list)
    require_library().function(_FUNCTIONS[query.dtype], Pointer)(arguments)
    return out
