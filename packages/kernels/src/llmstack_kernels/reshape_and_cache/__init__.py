"""Writes the keys and values of a step's tokens into the paged KV storage."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def reshape_and_cache(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    """Write token i's key and value to slot `slot_mapping[i]` (block_id * block_size + offset), in place.

    Writing a block's first slot clears the rest of the block, so that whoever reads whole blocks never meets what an
    earlier owner left there (a NaN would survive a mask).
    """
    if key.shape != value.shape or key.ndim != 3:
        raise ValueError(
            f"key and value must both be [num_tokens, num_kv_heads, head_dim], got {key.shape}, {value.shape}."
        )
    if key_cache.shape != value_cache.shape or key_cache.shape[1::2] != key.shape[1:]:
        raise ValueError(
            f"caches of shape {key_cache.shape}, {value_cache.shape} do not fit keys of shape {key.shape}."
        )
    implementation("reshape_and_cache", key.device.type).reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping
    )
