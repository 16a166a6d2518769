"""KV writes in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.native import Int, Pointer, require_library

_ARGUMENTS = (Pointer, Int, Pointer, Int, Pointer, Int, Pointer, Int, Pointer, Int, Int, Int, Int)


def reshape_and_cache(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor | None,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    key_scale: torch.Tensor | None = None,  # [num_kv_heads]
    value_scale: torch.Tensor | None = None,  # [num_kv_heads]
) -> None:
    """Write keys and values to their slots; tokens may lie apart, as slices of a fused projection do."""
    if key_scale is not None:
        reference.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
        return
    key = _prepare(key, key_cache.dtype)
    value = None if value is None else _prepare(value, key.dtype)
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size, size = key_cache.shape[2], key.element_size()
    whole = (block_size * head_dim, head_dim, 1)
    if any(cache.stride()[1:] != whole for cache in (key_cache, value_cache) if cache is not None):
        raise ValueError("Each block must be contiguous.")
    function = require_library().function("reshape_and_cache", *_ARGUMENTS)
    function(
        key.data_ptr(),
        key.stride(0) * size,
        0 if value is None else value.data_ptr(),
        0 if value is None else value.stride(0) * size,
        key_cache.data_ptr(),
        key_cache.stride(0) * size,
        0 if value_cache is None else value_cache.data_ptr(),
        0 if value_cache is None else value_cache.stride(0) * size,
        slot_mapping.data_ptr(),
        num_tokens,
        num_kv_heads,
        block_size,
        head_dim * size,
    )


def _prepare(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in the storage's type, with each token's heads one after another."""
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
