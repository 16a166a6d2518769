"""GPT-2: learned positions, pre-norm blocks, biases everywhere, output head tied to the token embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.attention_metadata import AttentionMetadata
from llmstack_model_runner.layers import (
    Attention,
    AttentionPlans,
    Embedding,
    LayerNorm,
    Linear,
    OutputHead,
    WeightSlot,
    collect_slots,
    plan_attention,
)
from llmstack_model_runner.layers.activation import linear_activation
from llmstack_model_runner.models.base import CausalLM, KVCaches, ModelKVSpec
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse


class GPT2(CausalLM):
    """`GPT2LMHeadModel`."""

    root: ClassVar[str] = "transformer."

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        refuse(config, "add_cross_attention", False)
        hidden_size = read_int(config, "n_embd", 768)
        num_heads = read_int(config, "n_head", 12)
        if hidden_size % num_heads:
            raise ValueError(f"config.json: n_embd {hidden_size} is not a multiple of n_head {num_heads}.")
        self.kv_spec = ModelKVSpec(
            num_layers=read_int(config, "n_layer", 12),
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            vocab_size=read_int(config, "vocab_size", 50257),
            max_model_len=read_int(config, "n_positions", 1024),
        )
        spec = self.kv_spec
        self._tokens = Embedding("transformer.wte", spec.vocab_size, hidden_size, dtype=dtype, device=device)
        self._positions = Embedding("transformer.wpe", spec.max_model_len, hidden_size, dtype=dtype, device=device)
        self._layers = [
            _Layer(config, index, hidden_size, num_heads, dtype, device) for index in range(spec.num_layers)
        ]
        eps = read_float(config, "layer_norm_epsilon", 1e-5)
        self._norm = LayerNorm("transformer.ln_f", hidden_size, eps, dtype=dtype, device=device)
        tied_to = self._tokens if read_bool(config, "tie_word_embeddings", True) else None
        self._head = OutputHead(spec.vocab_size, hidden_size, dtype=dtype, device=device, tied_to=tied_to)

    def slots(self) -> dict[str, WeightSlot]:
        """All tensors."""
        return collect_slots([self._tokens, self._positions, *self._layers, self._norm, self._head])

    def is_ignored(self, name: str) -> bool:
        """The causal mask of old checkpoints, and a copy of the tied head."""
        return name.endswith(".attn.bias") or name == "lm_head.weight" or super().is_ignored(name)

    def finish_loading(self) -> None:
        """Pack the head."""
        self._head.finish_loading()

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm."""
        plans = plan_attention(metadata, kv_caches[0][0], [None])
        hidden = self._positions(positions, addend=self._tokens(token_ids))
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden = layer(hidden, kv_cache, metadata, plans)
        return self._norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows."""
        return self._head(hidden)


class _Layer:
    def __init__(
        self,
        config: Mapping[str, Any],
        index: int,
        hidden_size: int,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        prefix = f"transformer.h.{index}."
        inner_size = read_int(config, "n_inner", 4 * hidden_size)
        eps = read_float(config, "layer_norm_epsilon", 1e-5)
        head_dim = hidden_size // num_heads

        def conv1d(name: str, in_features: int, out_features: int) -> Linear:
            parts = {prefix + name: out_features}
            return Linear(in_features, parts, has_bias=True, dtype=dtype, device=device, is_transposed=True)

        scale = head_dim**-0.5 if read_bool(config, "scale_attn_weights", True) else 1.0
        if read_bool(config, "scale_attn_by_inverse_layer_idx", False):
            scale /= index + 1
        self._attention_norm = LayerNorm(prefix + "ln_1", hidden_size, eps, dtype=dtype, device=device)
        self._qkv = conv1d("attn.c_attn", hidden_size, 3 * hidden_size)
        self._attention = Attention(num_heads, num_heads, head_dim, scale, device=device)
        self._attention_out = conv1d("attn.c_proj", hidden_size, hidden_size)
        self._mlp_norm = LayerNorm(prefix + "ln_2", hidden_size, eps, dtype=dtype, device=device)
        self._mlp_in = conv1d("mlp.c_fc", hidden_size, inner_size)
        self._activation = linear_activation(str(config.get("activation_function", "gelu_new")))
        self._mlp_out = conv1d("mlp.c_proj", inner_size, hidden_size)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots(
            [
                self._attention_norm,
                self._qkv,
                self._attention_out,
                self._mlp_norm,
                self._mlp_in,
                self._mlp_out,
            ]
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        plans: AttentionPlans,
    ) -> torch.Tensor:
        attention = self._attention
        qkv = self._qkv(self._attention_norm(hidden)).view(-1, 3, attention.num_heads, attention.head_dim)
        query, key, value = qkv.unbind(1)
        attended = attention(query, key, value, kv_cache, metadata, plans)
        hidden = self._attention_out(attended, residual=hidden)
        inner = self._mlp_in(self._mlp_norm(hidden), self._activation)
        return self._mlp_out(inner, residual=hidden)
