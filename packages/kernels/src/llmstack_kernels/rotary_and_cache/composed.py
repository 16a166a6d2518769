"""Rotary embedding and KV write as operations of their own, each by the best implementation for the device."""

from __future__ import annotations

import torch

from llmstack_kernels.reshape_and_cache import reshape_and_cache
from llmstack_kernels.rms_norm import rms_norm
from llmstack_kernels.rotary_embedding import rotary_embedding


def rotary_and_cache(
    positions: torch.Tensor,  # [num_tokens] int64
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_cache: torch.Tensor,  # [max_positions, rotary_dim] float32
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    key_scale: torch.Tensor | None = None,  # [num_kv_heads]
    value_scale: torch.Tensor | None = None,  # [num_kv_heads]
    query_norm: torch.Tensor | None = None,  # [head_dim]
    key_norm: torch.Tensor | None = None,  # [head_dim]
    eps: float = 0.0,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Norm, turn, then write."""
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm, eps), rms_norm(key, key_norm, eps)
    query, key = rotary_embedding(positions, query, key, cos_sin_cache)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return query


def is_available() -> bool:
    """True: the operations run on any device."""
    return True


def describe() -> str:
    """How it works."""
    return "rotary_embedding, then reshape_and_cache"
