"""Rotary embedding of queries and keys, and the write of keys and values into the paged KV storage, in one step."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.float8_cache import check_scales


def rotary_and_cache(
    positions: torch.Tensor,  # [num_tokens] int64
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_cache: torch.Tensor,  # [max_positions, rotary_dim] float32
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    *,
    key_scale: torch.Tensor | None = None,  # [num_kv_heads] float32
    value_scale: torch.Tensor | None = None,  # [num_kv_heads] float32
    query_norm: torch.Tensor | None = None,  # [head_dim]
    key_norm: torch.Tensor | None = None,  # [head_dim]
    eps: float = 0.0,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """The turned query; the turned key and the value go to their slots.

    What `rotary_embedding` and `reshape_and_cache` do one after the other, with the same arguments and for the same
    results: the key is rounded to its type before it is stored in another. With both norms, each head of query and key
    goes through `rms_norm` first.
    """
    rotary_dim, head_dim = cos_sin_cache.shape[-1], query.shape[-1]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"rotary dimension {rotary_dim} must be even and at most the head dimension {head_dim}.")
    if key.shape != value.shape or key.shape[::2] != query.shape[::2]:
        raise ValueError(f"query, key and value of shapes {query.shape}, {key.shape}, {value.shape} do not fit.")
    if key_cache.shape != value_cache.shape or key_cache.shape[1::2] != key.shape[1:]:
        raise ValueError(
            f"caches of shape {key_cache.shape}, {value_cache.shape} do not fit keys of shape {key.shape}."
        )
    _check_norms(query, query_norm, key_norm)
    check_scales(key_cache, key_scale, value_scale)
    module = implementation("rotary_and_cache", query.device.type)
    caches = (key_cache, value_cache, slot_mapping, key_scale, value_scale)
    out: torch.Tensor = module.rotary_and_cache(
        positions, query, key, value, cos_sin_cache, *caches, query_norm, key_norm, eps
    )
    return out


def _check_norms(query: torch.Tensor, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None) -> None:
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm go together.")
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None and (norm.shape != query.shape[-1:] or norm.dtype not in (query.dtype, torch.float32)):
            raise ValueError(
                f"{name} of {norm.dtype} {tuple(norm.shape)} does not fit heads of {query.dtype} {query.shape[-1]}."
            )
