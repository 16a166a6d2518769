"""The way of queries and keys from their projection to attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.rotary_and_cache import rotary_and_cache
from llmstack_model_runner.layers.norm import RMSNorm
from llmstack_model_runner.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True)
class HeadRotation:
    """Queries and keys are turned by their positions, and normed head by head before that where there are `norms`.

    Attributes:
        norms: Of queries and of keys.
    """

    rotary: RotaryEmbedding
    norms: tuple[RMSNorm, RMSNorm] | None = None

    def __call__(
        self,
        positions: torch.Tensor,  # [num_tokens]
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        slot_mapping: torch.Tensor,  # [num_tokens]
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """The query, turned; the turned key and the value go to their slots, over `scales` of keys and of values."""
        query_norm, key_norm = self.norms or (None, None)
        key_scale, value_scale = scales
        return rotary_and_cache(
            positions,
            query,
            key,
            value,
            self.rotary.table,
            *kv_cache,
            slot_mapping,
            key_scale=key_scale,
            value_scale=value_scale,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            eps=0.0 if query_norm is None else query_norm.eps,
        )
