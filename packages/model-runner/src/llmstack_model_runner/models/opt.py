"""OPT: learned positions counted from 2, norms before the blocks (or after them, in the 350m), ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from llmstack_model_runner.models.config_values import read_bool, read_int, refuse

# The position table's first rows were meant for padding.
_NUM_UNUSED_POSITIONS = 2
_EPS = 1e-5
_PREFIX = "model.decoder."


class OPT(CausalLM):
    """`OPTForCausalLM`."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        refuse(config, "layer_norm_elementwise_affine", True)
        size, num_heads = read_int(config, "hidden_size", 768), read_int(config, "num_attention_heads", 12)
        if size % num_heads:
            raise ValueError(f"config.json: hidden_size {size} is not a multiple of {num_heads} attention heads.")
        self.kv_spec = ModelKVSpec(
            num_layers=read_int(config, "num_hidden_layers", 12),
            num_kv_heads=num_heads,
            head_dim=size // num_heads,
            vocab_size=read_int(config, "vocab_size", 50272),
            max_model_len=read_int(config, "max_position_embeddings", 2048),
        )
        spec, embed_size = self.kv_spec, read_int(config, "word_embed_proj_dim", size)
        self._tokens = Embedding(_PREFIX + "embed_tokens", spec.vocab_size, embed_size, dtype=dtype, device=device)
        self._positions = Embedding(
            _PREFIX + "embed_positions",
            spec.max_model_len + _NUM_UNUSED_POSITIONS,
            size,
            dtype=dtype,
            device=device,
            num_unused_rows=_NUM_UNUSED_POSITIONS,
        )
        self._layers = [_Layer(config, index, size, num_heads, dtype, device) for index in range(spec.num_layers)]
        is_projected = embed_size != size
        self._project_in = _projection("project_in", embed_size, size, dtype, device) if is_projected else None
        self._project_out = _projection("project_out", size, embed_size, dtype, device) if is_projected else None
        has_norm = read_bool(config, "do_layer_norm_before", True)
        has_norm &= not read_bool(config, "_remove_final_layer_norm", False)
        name = _PREFIX + "final_layer_norm"
        self._norm = LayerNorm(name, size, _EPS, dtype=dtype, device=device) if has_norm else None
        tied_to = self._tokens if read_bool(config, "tie_word_embeddings", True) else None
        self._head = OutputHead(spec.vocab_size, embed_size, dtype=dtype, device=device, tied_to=tied_to)

    def slots(self) -> dict[str, WeightSlot]:
        """All tensors."""
        return collect_slots(
            [
                self._tokens,
                self._positions,
                self._project_in,
                *self._layers,
                self._norm,
                self._project_out,
                self._head,
            ]
        )

    def is_ignored(self, name: str) -> bool:
        """A copy of a tied head."""
        return name == "lm_head.weight" or super().is_ignored(name)

    def finish_loading(self) -> None:
        """Pack the head."""
        self._head.finish_loading()

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        """Hidden states after the last norm and projection."""
        plans = plan_attention(metadata, kv_caches[0][0], [None])
        hidden = self._tokens(token_ids)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        hidden = self._positions(positions, addend=hidden)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden = layer(hidden, kv_cache, metadata, plans)
        if self._norm is not None:
            hidden = self._norm(hidden)
        return hidden if self._project_out is None else self._project_out(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows."""
        return self._head(hidden)


def _projection(name: str, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> Linear:
    return Linear(in_features, {_PREFIX + name: out_features}, has_bias=False, dtype=dtype, device=device)


class _Layer:
    def __init__(
        self,
        config: Mapping[str, Any],
        index: int,
        size: int,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        prefix = f"{_PREFIX}layers.{index}."
        has_bias = read_bool(config, "enable_bias", True)
        inner_size = read_int(config, "ffn_dim", 4 * size)

        def linear(in_features: int, parts: Mapping[str, int]) -> Linear:
            named = {prefix + name: out_features for name, out_features in parts.items()}
            return Linear(in_features, named, has_bias=has_bias, dtype=dtype, device=device)

        self._is_norm_first = read_bool(config, "do_layer_norm_before", True)
        self._attention_norm = LayerNorm(prefix + "self_attn_layer_norm", size, _EPS, dtype=dtype, device=device)
        self._qkv = linear(size, {f"self_attn.{name}_proj": size for name in "qkv"})
        head_dim = size // num_heads
        self._attention = Attention(num_heads, num_heads, head_dim, head_dim**-0.5, device=device)
        self._attention_out = linear(size, {"self_attn.out_proj": size})
        self._mlp_norm = LayerNorm(prefix + "final_layer_norm", size, _EPS, dtype=dtype, device=device)
        self._mlp_in = linear(size, {"fc1": inner_size})
        self._activation = linear_activation(str(config.get("activation_function", "relu")))
        self._mlp_out = linear(inner_size, {"fc2": size})

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
        if self._is_norm_first:
            hidden = self._attend(self._attention_norm(hidden), hidden, kv_cache, metadata, plans)
            return self._feed_forward(self._mlp_norm(hidden), hidden)
        hidden = self._attention_norm(self._attend(hidden, hidden, kv_cache, metadata, plans))
        return self._mlp_norm(self._feed_forward(hidden, hidden))

    def _attend(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        plans: AttentionPlans,
    ) -> torch.Tensor:
        attention = self._attention
        qkv = self._qkv(hidden).view(-1, 3, attention.num_heads, attention.head_dim)
        query, key, value = qkv.unbind(1)
        return self._attention_out(attention(query, key, value, kv_cache, metadata, plans), residual=residual)

    def _feed_forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._mlp_out(self._mlp_in(hidden, self._activation), residual=residual)
