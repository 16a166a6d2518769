"""RoPE and norms of single heads, applied to queries and keys before attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.rotary_and_cache import RotaryInputs, rotary_and_cache
from llmstack_model_runner.layers.attention_metadata import LayerCache
from llmstack_model_runner.layers.norm import RMSNorm
from llmstack_model_runner.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """Applies RoPE to queries and keys, after norms of single heads if there are any.

    Attributes:
        norms: Norm of query heads and norm of key heads, or None.
    """

    rotary: RotaryEmbedding
    norms: tuple[RMSNorm, RMSNorm] | None = None

    def __call__(
        self,
        positions: torch.Tensor,  # [num_tokens]
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_cache: LayerCache,
        slot_mapping: torch.Tensor,  # [num_tokens]
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Writes rotated keys and values to their slots, divided by `scales`, and returns the rotated queries."""
        query_norm, key_norm = self.norms or (None, None)
        key_cache, value_cache = kv_cache
        key_scale, value_scale = scales
        inputs = RotaryInputs(
            positions,
            query,
            key,
            value,
            self.rotary.table,
            key_cache,
            value_cache,
            slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            eps=0.0 if query_norm is None else query_norm.eps,
        )
        return rotary_and_cache(inputs)
