"""KV writes in plain PyTorch."""

from __future__ import annotations

import torch

from llmstack_kernels.float8_cache import to_stored


def reshape_and_cache(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    key_scale: torch.Tensor | None = None,  # [num_kv_heads]
    value_scale: torch.Tensor | None = None,  # [num_kv_heads]
) -> None:
    """Write keys and values to their slots."""
    is_written = slot_mapping >= 0
    slots = slot_mapping[is_written]
    for heads, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        _write(heads[is_written], cache, slots, scale)


def _write(heads: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None) -> None:
    block_size = cache.shape[2]
    block_ids = torch.div(slots, block_size, rounding_mode="floor")
    offsets = slots - block_ids * block_size
    stored = heads.to(cache.dtype) if scale is None else to_stored(heads, scale[:, None])
    # As bytes, since few operations know the types of 8 bits.
    raw, stored = (x.view(torch.uint8) if scale is not None else x for x in (cache, stored))
    raw[block_ids[offsets == 0]] = 0
    raw[block_ids, :, offsets] = stored
