"""One block of the Llama family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from llmstack_kernels.activation import silu_and_mul
from llmstack_model_runner.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers import (
    Attention,
    AttentionPlans,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
)


@dataclass(frozen=True, slots=True)
class LlamaLayerSettings:
    """Sizes and variants of one block."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    has_qkv_bias: bool
    has_attention_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_window: int | None


class LlamaLayer:
    """Attention and gated feed-forward, each after a norm and added to the residual."""

    def __init__(
        self,
        prefix: str,
        settings: LlamaLayerSettings,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._rotary = rotary
        self._query_size = settings.num_heads * settings.head_dim
        self._kv_size = settings.num_kv_heads * settings.head_dim

        def linear(in_features: int, parts: Mapping[str, int], has_bias: bool) -> Linear:
            named = {prefix + name: size for name, size in parts.items()}
            return Linear(in_features, named, has_bias=has_bias, dtype=dtype, device=device)

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(prefix + name, size, settings.eps, dtype=dtype, device=device)

        size, inner_size = settings.hidden_size, settings.intermediate_size
        qkv = {
            "self_attn.q_proj": self._query_size,
            "self_attn.k_proj": self._kv_size,
            "self_attn.v_proj": self._kv_size,
        }
        gate_up = {"mlp.gate_proj": inner_size, "mlp.up_proj": inner_size}
        self._attention_norm = norm("input_layernorm", size)
        self._qkv = linear(size, qkv, settings.has_qkv_bias)
        self._query_norm = norm("self_attn.q_norm", settings.head_dim) if settings.has_qk_norm else None
        self._key_norm = norm("self_attn.k_norm", settings.head_dim) if settings.has_qk_norm else None
        self._attention = Attention(
            settings.num_heads,
            settings.num_kv_heads,
            settings.head_dim,
            settings.head_dim**-0.5,
            settings.sliding_window,
        )
        self._attention_out = linear(self._query_size, {"self_attn.o_proj": size}, settings.has_attention_out_bias)
        self._mlp_norm = norm("post_attention_layernorm", size)
        self._gate_up = linear(size, gate_up, settings.has_mlp_bias)
        self._down = linear(inner_size, {"mlp.down_proj": size}, settings.has_mlp_bias)

    def slots(self) -> dict[str, WeightSlot]:
        """All tensors."""
        return collect_slots(
            [
                self._attention_norm,
                self._qkv,
                self._query_norm,
                self._key_norm,
                self._attention_out,
                self._mlp_norm,
                self._gate_up,
                self._down,
            ]
        )

    def __call__(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        residual: torch.Tensor | None,  # None before the first layer
        positions: torch.Tensor,  # [num_tokens]
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        plans: AttentionPlans,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The feed-forward's output and the residual it is to be added to."""
        normed, residual = self._attention_norm.add(hidden, residual)
        query, key, value = self._heads(self._qkv(normed))
        query, key = self._rotary(positions, query, key)
        attended = self._attention(query, key, value, kv_cache, metadata, plans)
        normed, residual = self._mlp_norm.add(self._attention_out(attended), residual)
        return self._down(silu_and_mul(self._gate_up(normed))), residual

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value [num_tokens, heads, head_dim], normed where the model norms them."""
        head_dim = self._settings.head_dim
        query, key, value = (
            part.view(part.shape[0], -1, head_dim)
            for part in qkv.split([self._query_size, self._kv_size, self._kv_size], dim=-1)
        )
        if self._query_norm is not None and self._key_norm is not None:
            query, key = self._query_norm(query), self._key_norm(key)
        return query, key, value
