"""One block of the Llama family."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.activation import sigmoid_gate
from llmstack_model_runner.layers import (
    Attention,
    AttentionPlans,
    HeadRotation,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
)
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerCache
from llmstack_model_runner.layers.experts import Experts, ExpertSettings
from llmstack_model_runner.layers.feed_forward import GatedFeedForward
from llmstack_model_runner.layers.head_split import HeadSplit
from llmstack_model_runner.layers.rotary import RopeParameters
from llmstack_model_runner.layers.shared_expert import GatedSharedExpert
from llmstack_model_runner.layers.stacked_experts import StackedExperts, StackedExpertSettings
from llmstack_model_runner.models.kv_spec import LayerKVSpec, keys_and_values


@dataclass(frozen=True, slots=True)
class LlamaLayerSettings:
    """Sizes and variants of one block.

    Attributes:
        scale: Factor of the attention scores; head_dim ** -0.5 if None.
        soft_cap: Soft cap of the attention scores, or None.
        has_qk_norm: Query and key heads are normalised.
        has_post_norms: The outputs of attention and feed-forward are normalised too.
        is_norm_offset: Norms are stored as their scale minus 1.
        has_fused_projections: The checkpoint joins q, k and v, and gate and up.
        has_output_gate: What a head attends to is multiplied by the sigmoid of a gate, which follows its query.
        has_sinks: Each head's softmax has a score more, which has no value.
        experts: Experts that replace the feed-forward, or None.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeParameters
    activation: str
    sliding_window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    is_norm_offset: bool = False
    has_fused_projections: bool = False
    has_output_gate: bool = False
    has_sinks: bool = False
    experts: ExpertSettings | None = None

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec:
        """What the layer keeps in the KV storage, of the whole model, which computes in `dtype`."""
        return keys_and_values(self.num_kv_heads, self.head_dim, self.sliding_window)


FeedForward = GatedFeedForward | Experts | GatedSharedExpert


def make_feed_forward(
    prefix: str, settings: LlamaLayerSettings, dtype: torch.dtype, device: torch.device
) -> FeedForward:
    """The feed-forward of a block, or the experts that replace it; `prefix` is that of the block's tensors."""
    size, activation, experts = settings.hidden_size, settings.activation, settings.experts

    def dense(inner_size: int, name: str) -> GatedFeedForward:
        return GatedFeedForward(
            prefix,
            size,
            inner_size,
            activation,
            has_bias=settings.has_mlp_bias,
            is_joined=settings.has_fused_projections,
            dtype=dtype,
            device=device,
            name=name,
        )

    if experts is None:
        return dense(settings.intermediate_size, "mlp")
    if isinstance(experts, StackedExpertSettings):
        return StackedExperts(prefix, size, activation, experts, dtype, device)
    routed = Experts(prefix, size, activation, experts, dtype, device)
    if not experts.gated_shared_size:
        return routed
    shared = dense(experts.gated_shared_size, f"{experts.name}.shared_expert")
    return GatedSharedExpert(f"{prefix}{experts.name}.shared_expert_gate", routed, shared, size, dtype, device)


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
        self._prefix = prefix
        self._settings = settings
        split = HeadSplit(
            settings.num_heads, settings.num_kv_heads, settings.head_dim, has_gates=settings.has_output_gate
        )
        self._sizes = [split.query_size, split.gate_size, split.kv_size, split.kv_size]

        def norm(name: str, size: int) -> RMSNorm:
            is_offset = settings.is_norm_offset
            return RMSNorm(prefix + name, size, settings.eps, dtype=dtype, device=device, is_offset=is_offset)

        size, head_dim = settings.hidden_size, settings.head_dim
        has_post_norms = settings.has_post_norms
        self._attention_norm = norm("input_layernorm", size)
        qkv_names = [f"{prefix}self_attn.{name}" for name in self._qkv_names()]
        self._qkv = Linear(
            size,
            split.parts(qkv_names),
            has_bias=settings.has_qkv_bias,
            dtype=dtype,
            device=device,
            part_to_row_order=split.orders(qkv_names),
            part_to_outputs=split.outputs(qkv_names),
        )
        head_norms = (norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim))
        self._rotate = HeadRotation(rotary, head_norms if settings.has_qk_norm else None)
        self._attention = Attention(
            len(split.heads),
            len(split.kv_heads),
            head_dim,
            settings.scale or head_dim**-0.5,
            settings.sliding_window,
            device=device,
            soft_cap=settings.soft_cap,
            has_sinks=settings.has_sinks,
        )
        self._heads_of_rank = split.heads
        self._attention_out = Linear(
            settings.num_heads * head_dim,
            {f"{prefix}self_attn.o_proj": size},
            has_bias=settings.has_attention_out_bias,
            dtype=dtype,
            device=device,
            inputs=split.inputs,
        )
        self._post_attention_norm = norm("post_attention_layernorm", size) if has_post_norms else None
        mlp_norm_name = "pre_feedforward_layernorm" if has_post_norms else "post_attention_layernorm"
        self._mlp_norm = norm(mlp_norm_name, size)
        self._feed_forward = make_feed_forward(prefix, settings, dtype, device)
        self._post_mlp_norm = norm("post_feedforward_layernorm", size) if has_post_norms else None

    def _qkv_names(self) -> list[str]:
        return ["qkv_proj"] if self._settings.has_fused_projections else ["q_proj", "k_proj", "v_proj"]

    def slots(self) -> dict[str, WeightSlot]:
        name, num_heads = f"{self._prefix}self_attn.sinks", self._settings.num_heads
        sinks = self._attention.sink_slots(name, num_heads, self._heads_of_rank)
        return sinks | collect_slots(
            [
                self._attention_norm,
                self._qkv,
                *(self._rotate.norms or ()),
                self._attention_out,
                self._post_attention_norm,
                self._mlp_norm,
                self._feed_forward,
                self._post_mlp_norm,
            ]
        )

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Scales of 8-bit keys and values, under both names that checkpoints use."""
        key_names, value_names = (
            [f"{self._prefix}self_attn.{part}{letter}_scale" for part in ("", f"{letter}_proj.")] for letter in "kv"
        )
        return self._attention.kv_scales.slots(key_names, value_names)

    def __call__(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        residual: torch.Tensor | None,  # None before the first layer
        positions: torch.Tensor,  # [num_tokens]
        kv_cache: LayerCache,
        metadata: AttentionMetadata,
        plans: AttentionPlans,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The feed-forward's output, and the residual that the next norm adds it to."""
        normed, residual = self._attention_norm.add(hidden, residual)
        gate, heads = self._heads(self._qkv(normed))
        attended = self._attention.rotate_and_attend(self._rotate, positions, *heads, kv_cache, metadata, plans)
        if self._settings.has_output_gate:
            attended = sigmoid_gate(attended, metadata.of_queries(gate))
        attended = self._attention_out(attended)
        if self._post_attention_norm is not None:
            attended = self._post_attention_norm(attended)
        normed, residual = self._mlp_norm.add(attended, metadata.of_queries(residual))
        fed = self._feed_forward(normed)
        return fed if self._post_mlp_norm is None else self._post_mlp_norm(fed), residual

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The gates, as wide as the queries or 0; and query, key and value, each [num_tokens, heads, head_dim]."""
        head_dim = self._settings.head_dim
        query, gate, key, value = qkv.split(self._sizes, dim=-1)
        query, key, value = (part.view(part.shape[0], -1, head_dim) for part in (query, key, value))
        return gate, (query, key, value)
