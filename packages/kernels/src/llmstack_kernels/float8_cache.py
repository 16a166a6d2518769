"""Keys and values stored in 8 bits, with a scale per KV head."""

from __future__ import annotations

import torch

STORED_TYPE = torch.float8_e4m3fn
MAX_STORED = 448.0  # the largest value of the type


def check_scales(
    cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_scale: torch.Tensor | None,  # [num_kv_heads] float32
    value_scale: torch.Tensor | None,  # [num_kv_heads] float32
) -> None:
    """ValueError unless both scales are given for a cache of 8 bits, and none for others."""
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (scale is None) == (cache.dtype == STORED_TYPE):
            raise ValueError(f"{name} goes with caches of {STORED_TYPE}, and only with them; this is {cache.dtype}.")
        if scale is not None and (scale.shape != cache.shape[1:2] or scale.dtype != torch.float32):
            raise ValueError(
                f"{name} must be float32 of shape [{cache.shape[1]}], got {scale.dtype} of {tuple(scale.shape)}."
            )


def to_stored(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` divided by its scales, which must broadcast, in 8 bits; clamped to the range of the type."""
    return (x.float() / scale).clamp(-MAX_STORED, MAX_STORED).to(STORED_TYPE)
