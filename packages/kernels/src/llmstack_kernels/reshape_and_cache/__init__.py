"""Writes of keys and values into the paged KV cache."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.float8_cache import check_scales


def reshape_and_cache(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor | None,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    key_scale: torch.Tensor | None = None,  # [num_kv_heads] float32
    value_scale: torch.Tensor | None = None,  # [num_kv_heads] float32
) -> None:
    """Write token i's key and value to slot `slot_mapping[i]` (block_id * block_size + offset), in place.

    Without a value only keys are written, as of latents, which are both. A token whose slot is -1 is not written. Other
    slots have to be in the cache, which is not checked. Into caches of float8_e4m3fn goes a number over its head's
    scale, rounded, at most 448.

    In PyTorch and in native code, writing a block's first slot clears the rest of the block, so that
    readers of whole blocks never see values of an earlier owner (a NaN would survive a mask). The Triton backend clears
    nothing: attention on a GPU loads the slots of its context only.
    """
    if (value is None) != (value_cache is None):
        raise ValueError("value and value_cache go together.")
    if key.ndim != 3 or (value is not None and key.shape != value.shape):
        shapes = [None if x is None else tuple(x.shape) for x in (key, value)]
        raise ValueError(f"key and value must both be [num_tokens, num_kv_heads, head_dim], got {shapes}.")
    if key_cache.shape[1::2] != key.shape[1:] or (value_cache is not None and key_cache.shape != value_cache.shape):
        shapes = [None if x is None else tuple(x.shape) for x in (key_cache, value_cache)]
        raise ValueError(f"caches of shapes {shapes} do not fit keys of shape {tuple(key.shape)}.")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != key.shape[:1]:
        raise ValueError(
            f"slot_mapping must be int64 of shape {tuple(key.shape[:1])}, "
            f"got {slot_mapping.dtype} of shape {tuple(slot_mapping.shape)}."
        )
    check_scales(key_cache, key_scale, key_scale if value is None else value_scale)
    implementation("reshape_and_cache", key.device.type).reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale
    )
