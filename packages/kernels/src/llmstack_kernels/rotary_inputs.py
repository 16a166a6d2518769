"""Inputs of rotary embedding with the KV write, which every backend receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from llmstack_kernels.float8_cache import check_scales


class RotaryInputs(NamedTuple):
    """Queries, keys and values of a step, and the cache that keys and values are written to.

    Attributes:
        key_scale: With caches of float8_e4m3fn: keys are divided by their head's scale.
        value_scale: As `key_scale`, for values.
        query_norm: Weight of the RMS norm of each query head; given together with `key_norm`, or not at all.
        key_norm: Weight of the RMS norm of each key head.
        eps: The epsilon of both norms.
    """

    positions: torch.Tensor  # [num_tokens] int64
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_cache: torch.Tensor  # [max_positions, rotary_dim] float32
    key_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor  # [num_tokens] int64
    key_scale: torch.Tensor | None = None  # [num_kv_heads] float32
    value_scale: torch.Tensor | None = None  # [num_kv_heads] float32
    query_norm: torch.Tensor | None = None  # [head_dim]
    key_norm: torch.Tensor | None = None  # [head_dim]
    eps: float = 0.0

    def check(self) -> None:
        """Raises ValueError if shapes, norms or scales do not fit together."""
        query, key, value = self.query, self.key, self.value
        rotary_dim, head_dim = self.cos_sin_cache.shape[-1], query.shape[-1]
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(f"rotary dimension {rotary_dim} must be even and at most the head dimension {head_dim}.")
        if key.shape != value.shape or key.shape[::2] != query.shape[::2]:
            raise ValueError(f"query, key and value of shapes {query.shape}, {key.shape}, {value.shape} do not fit.")
        if self.key_cache.shape != self.value_cache.shape or self.key_cache.shape[1::2] != key.shape[1:]:
            shapes = f"{self.key_cache.shape}, {self.value_cache.shape}"
            raise ValueError(f"caches of shape {shapes} do not fit keys of shape {key.shape}.")
        self._check_norms()
        check_scales(self.key_cache, self.key_scale, self.value_scale)

    def _check_norms(self) -> None:
        query = self.query
        if (self.query_norm is None) != (self.key_norm is None):
            raise ValueError("query_norm and key_norm go together.")
        for name, norm in (("query_norm", self.query_norm), ("key_norm", self.key_norm)):
            if norm is not None and (norm.shape != query.shape[-1:] or norm.dtype not in (query.dtype, torch.float32)):
                heads = f"{query.dtype} {query.shape[-1]}"
                raise ValueError(f"{name} of {norm.dtype} {tuple(norm.shape)} does not fit heads of {heads}.")

    def apply(
        self,
        rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
        rotary_embedding: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        reshape_and_cache: Callable[..., None],
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """The rotated query, by three operations one after the other; keys and values are in their slots then."""
        query, key = self.query, self.key
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rms_norm(query, self.query_norm, self.eps), rms_norm(key, self.key_norm, self.eps)
        query, key = rotary_embedding(self.positions, query, key, self.cos_sin_cache)
        caches = (self.key_cache, self.value_cache, self.slot_mapping, self.key_scale, self.value_scale)
        reshape_and_cache(key, self.value, *caches)
        return query
