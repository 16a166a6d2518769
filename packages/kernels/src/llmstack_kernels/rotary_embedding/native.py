"""Rotary position embedding in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Int, Pointer, require_library

_ARGUMENTS = (Pointer, Pointer, Int, Pointer, Pointer, Int, Pointer, Pointer, Int, Int, Int, Int, Int)


def rotary_embedding(
    positions: torch.Tensor,  # [num_tokens] int64
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_cache: torch.Tensor,  # [max_positions, rotary_dim] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates query and key; tokens may be strided, as slices of a fused projection are."""
    if query.dtype not in DTYPE_TO_SUFFIX:
        return reference.rotary_embedding(positions, query, key, cos_sin_cache)
    query, key = _with_whole_tokens(query), _with_whole_tokens(key)
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    num_tokens, num_heads, head_dim = query.shape
    function = require_library().function(f"rotary_embedding_{DTYPE_TO_SUFFIX[query.dtype]}", *_ARGUMENTS)
    function(
        positions.data_ptr(),
        query.data_ptr(),
        query.stride(0),
        query_out.data_ptr(),
        key.data_ptr(),
        key.stride(0),
        key_out.data_ptr(),
        cos_sin_cache.data_ptr(),
        num_tokens,
        num_heads,
        key.shape[1],
        head_dim,
        cos_sin_cache.shape[1],
    )
    return query_out, key_out


def _with_whole_tokens(x: torch.Tensor) -> torch.Tensor:
    """`x` with each token's heads one after another."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
