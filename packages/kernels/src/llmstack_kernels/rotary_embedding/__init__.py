"""Rotary position embedding in NeoX style: the halves of a head are rotated."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def rotary_embedding(
    positions: torch.Tensor,  # [num_tokens] int64
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_cache: torch.Tensor,  # [max_positions, rotary_dim] float32: cosines, then sines, of rotary_dim / 2 angles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key rotated by their positions' angles; dimensions past `rotary_dim` stay unchanged."""
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or rotary_dim > query.shape[-1]:
        raise ValueError(
            f"rotary dimension {rotary_dim} must be even and at most the head dimension {query.shape[-1]}."
        )
    out: tuple[torch.Tensor, torch.Tensor] = implementation("rotary_embedding", query.device.type).rotary_embedding(
        positions, query, key, cos_sin_cache
    )
    return out
