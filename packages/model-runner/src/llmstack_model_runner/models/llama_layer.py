"""One block of the Llama family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from llmstack_kernels.activation import sigmoid_gate
from llmstack_model_runner.layers import (
    Attention,
    HeadRotation,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
)
from llmstack_model_runner.layers.attention_metadata import LayerCache, LayerOutput, LayerStep
from llmstack_model_runner.layers.experts import Experts, ExpertSettings
from llmstack_model_runner.layers.feed_forward import GatedFeedForward
from llmstack_model_runner.layers.head_split import HeadSplit
from llmstack_model_runner.layers.kv_scales import KVScales
from llmstack_model_runner.layers.mixer import Mixer
from llmstack_model_runner.layers.norm import SharedRMSNorm
from llmstack_model_runner.layers.rotary import RopeParameters
from llmstack_model_runner.layers.scale import Scale
from llmstack_model_runner.layers.sharding import spread
from llmstack_model_runner.layers.shared_expert import GatedSharedExpert, SharedExperts
from llmstack_model_runner.layers.stacked_experts import StackedExperts, StackedExpertSettings
from llmstack_model_runner.models.kv_spec import LayerKVSpec, keys_and_values


class DecoderLayer(Protocol):
    """One block of a model of the family."""

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors that it needs."""

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Slots of tensors that only some checkpoints have."""

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The output, and the residual that the next norm adds it to.

        `hidden`, `residual`: Each [num_tokens, hidden_size]; before the first layer there is no residual.
        """


@dataclass(frozen=True, slots=True)
class LlamaLayerSettings:
    """Sizes and variants of one block.

    Attributes:
        rope: None for a layer whose attention knows no positions.
        scale: Factor of the attention scores; head_dim ** -0.5 if None.
        soft_cap: Soft cap of the attention scores, or None.
        has_qk_norm: Query and key heads are normalised.
        has_whole_qk_norm: All query heads are normalised together, and all key heads.
        has_post_norms: The outputs of attention and feed-forward are normalised too.
        is_norm_offset: Norms are stored as their scale minus 1.
        has_float32_norms: Norms are scaled in float32.
        has_fused_projections: The checkpoint joins q, k and v, and gate and up.
        has_joined_gate: It joins gate and up alone.
        has_value_norm: Value heads are normalised, without a scale.
        are_keys_values: Values are what the keys are before their norm; the checkpoint has no projection of their own.
        has_output_gate: What a head attends to is multiplied by the sigmoid of a gate, which follows its query.
        has_head_gates: It is multiplied by the sigmoid of one gate per head, which has a projection of its own.
        attention_size: Width of what the attention sees, where that is not the hidden size; 0 where it is.
        has_rotated_pairs: RoPE rotates neighbouring numbers of the checkpoint's heads, not those of two halves.
        has_sinks: Each head's softmax has a score more, which has no value.
        residual_scale: Factor of what attention and feed-forward add to the residual.
        experts: Experts that replace the feed-forward, or None.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeParameters | None
    activation: str
    sliding_window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_whole_qk_norm: bool = False
    has_post_norms: bool = False
    is_norm_offset: bool = False
    has_float32_norms: bool = False
    has_fused_projections: bool = False
    has_joined_gate: bool = False
    has_value_norm: bool = False
    are_keys_values: bool = False
    has_output_gate: bool = False
    has_head_gates: bool = False
    attention_size: int = 0
    has_rotated_pairs: bool = False
    has_sinks: bool = False
    residual_scale: float = 1.0
    experts: ExpertSettings | None = None

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec | None:
        """The layer's memory in the KV storage, of the whole model, which computes in `dtype`; None for nothing."""
        return keys_and_values(self.num_kv_heads, self.head_dim, self.sliding_window)

    def norm(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
        """A norm of the block, or of the model, of this name."""
        norm_dtype = torch.float32 if self.has_float32_norms else dtype
        return RMSNorm(name, size, self.eps, dtype=norm_dtype, device=device, is_offset=self.is_norm_offset)

    def make_mixer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> Mixer:
        """Its attention, without weights; `prefix` is that of the block's tensors, and `rotary` is that of `rope`."""
        return SelfAttention(f"{prefix}self_attn.", self, rotary, dtype, device)

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The layer of this number, without weights."""
        return LlamaLayer(f"model.layers.{number}.", self, rotary, dtype, device)

    def make_draft_layer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """Such a layer outside of the model, which guesses a further token; `prefix` is that of its tensors."""
        return LlamaLayer(prefix, self, rotary, dtype, device)


FeedForward = GatedFeedForward | Experts | SharedExperts | GatedSharedExpert


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
            is_joined=settings.has_fused_projections or settings.has_joined_gate,
            dtype=dtype,
            device=device,
            name=name,
        )

    if experts is None:
        return dense(settings.intermediate_size, "mlp")
    if isinstance(experts, StackedExpertSettings):
        return StackedExperts(prefix, size, activation, experts, dtype, device)
    routed = Experts(prefix, size, activation, experts, dtype, device)
    if experts.shared_size:
        return SharedExperts(routed, dense(experts.shared_size, f"{experts.name}.shared_experts"))
    if not experts.gated_shared_size:
        return routed
    shared = dense(experts.gated_shared_size, f"{experts.name}.shared_expert")
    return GatedSharedExpert(f"{prefix}{experts.name}.shared_expert_gate", routed, shared, size, dtype, device)


class SelfAttention(Mixer):
    """Attention of a block with its projections; heads are normalised and rotated in between."""

    def __init__(
        self,
        prefix: str,
        settings: LlamaLayerSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of the attention's tensors, such as `model.layers.0.self_attn.`."""
        self._prefix, self._settings = prefix, settings
        split = HeadSplit(
            settings.num_heads, settings.num_kv_heads, settings.head_dim,
            has_gates=settings.has_output_gate, has_pairs=settings.has_rotated_pairs,
        )  # fmt: skip
        self._sizes = [split.query_size, split.gate_size, split.kv_size, split.kv_size]
        size, head_dim = settings.hidden_size, settings.head_dim
        names = ["qkv_proj"] if settings.has_fused_projections else ["q_proj", "k_proj", "v_proj"]
        qkv_names = [f"{prefix}{name}" for name in names]
        parts = split.parts(qkv_names)
        if settings.are_keys_values:
            del parts[f"{prefix}v_proj"], self._sizes[-1]
        self._qkv = Linear(
            settings.attention_size or size,
            parts,
            has_bias=settings.has_qkv_bias,
            dtype=dtype,
            device=device,
            part_to_row_order=split.orders(qkv_names),
            part_to_outputs={name: outputs for name, outputs in split.outputs(qkv_names).items() if name in parts},
        )
        self._value_norm: RMSNorm | None = None
        if settings.has_value_norm:
            self._value_norm = RMSNorm("", head_dim, settings.eps, dtype=dtype, device=device, has_scale=False)
        self._rotate = None if rotary is None else HeadRotation(rotary, self._make_head_norms(dtype, device))
        self._whole_norms = self._make_whole_norms(split, dtype, device) if settings.has_whole_qk_norm else []
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
        self._gates: Linear | None = None
        if settings.has_head_gates:
            gates, owns = {f"{prefix}g_proj": settings.num_heads}, {f"{prefix}g_proj": [split.heads]}
            self._gates = Linear(size, gates, has_bias=False, dtype=dtype, device=device, part_to_outputs=owns)
        self._out = Linear(
            settings.num_heads * head_dim,
            {f"{prefix}o_proj": size},
            has_bias=settings.has_attention_out_bias,
            dtype=dtype,
            device=device,
            inputs=split.inputs,
        )

    def _make_head_norms(self, dtype: torch.dtype, device: torch.device) -> tuple[RMSNorm, RMSNorm] | None:
        own, prefix = self._settings, self._prefix
        if not own.has_qk_norm:
            return None
        query, key = (own.norm(prefix + name, own.head_dim, dtype, device) for name in ("q_norm", "k_norm"))
        return query, key

    def _make_whole_norms(self, split: HeadSplit, dtype: torch.dtype, device: torch.device) -> list[SharedRMSNorm]:
        """The norms of all query heads and of all key heads."""
        own = self._settings
        runs = {"q_norm": (own.num_heads, split.heads), "k_norm": (own.num_kv_heads, split.kv_heads)}
        return [
            SharedRMSNorm(
                f"{self._prefix}{name}", count * own.head_dim, spread(heads, own.head_dim), own.eps,
                dtype=dtype, device=device,
            )
            for name, (count, heads) in runs.items()
        ]  # fmt: skip

    @property
    def kv_scales(self) -> KVScales:
        """Scales of its 8-bit keys and values."""
        return self._attention.kv_scales

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the projections, and of sinks and norms of heads if there are any."""
        norms = None if self._rotate is None else self._rotate.norms
        sinks = self._attention.sink_slots(f"{self._prefix}sinks", self._settings.num_heads, self._heads_of_rank)
        return sinks | collect_slots([self._qkv, *(norms or ()), *self._whole_norms, self._gates, self._out])

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Scales of 8-bit keys and values, under both names that checkpoints use."""
        key_names, value_names = (
            [f"{self._prefix}{part}{letter}_scale" for part in ("", f"{letter}_proj.")] for letter in "kv"
        )
        return self._attention.kv_scales.slots(key_names, value_names)

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_queries, hidden_size]
        """The projected output of attention."""
        gate, heads = self._heads(self._qkv(x))
        if self._rotate is None:
            attended = self._attention(*heads, step)
        else:
            attended = self._attention.rotate_and_attend(self._rotate, *heads, step)
        if self._settings.has_output_gate:
            attended = sigmoid_gate(attended, step.metadata.of_queries(gate))
        if self._gates is not None:
            gates = step.metadata.of_queries(self._gates(x)).reshape(-1, 1)  # one per token and head
            by_head = attended.view(-1, self._settings.head_dim)
            attended = sigmoid_gate(by_head, gates).view(attended.shape)
        return self._out(attended)

    def write_keys_and_values(
        self, x: torch.Tensor, positions: torch.Tensor, kv_cache: LayerCache, slot_mapping: torch.Tensor
    ) -> None:
        """Writes what later tokens attend to, and attends to nothing; heads are rotated."""
        if self._rotate is not None:
            scales = self.kv_scales.of(kv_cache[0])
            self._rotate(positions, *self._heads(self._qkv(x))[1], kv_cache, slot_mapping, scales)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The gates, as wide as the queries or 0; and query, key and value, each [num_tokens, heads, head_dim]."""
        head_dim = self._settings.head_dim
        query, gate, key, *values = qkv.split(self._sizes, dim=-1)
        if self._whole_norms:
            query, key = (norm(part) for norm, part in zip(self._whole_norms, (query, key), strict=True))
        query, key, value = (part.view(part.shape[0], -1, head_dim) for part in (query, key, *(values or [key])))
        return gate, (query, key, value if self._value_norm is None else self._value_norm(value))


class LlamaLayer:
    """Attention, or a mixer in its place, and feed-forward, each after a norm and added to the residual."""

    def __init__(
        self,
        prefix: str,
        settings: LlamaLayerSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._scale = Scale(settings.residual_scale, device)

        def norm(name: str) -> RMSNorm:
            return settings.norm(prefix + name, settings.hidden_size, dtype, device)

        has_post_norms = settings.has_post_norms
        self._mixer_norm = norm("input_layernorm")
        self._mixer = settings.make_mixer(prefix, rotary, dtype, device)
        self._post_mixer_norm = norm("post_attention_layernorm") if has_post_norms else None
        self._mlp_norm = norm("pre_feedforward_layernorm" if has_post_norms else "post_attention_layernorm")
        self._feed_forward = make_feed_forward(prefix, settings, dtype, device)
        self._post_mlp_norm = norm("post_feedforward_layernorm") if has_post_norms else None

    @property
    def kv_scales(self) -> KVScales:
        """Scales of its 8-bit keys and values."""
        return self._attention.kv_scales

    @property
    def _attention(self) -> SelfAttention:
        if not isinstance(self._mixer, SelfAttention):
            raise TypeError("the layer writes no keys and values")
        return self._mixer

    def write_keys_and_values(
        self, x: torch.Tensor, positions: torch.Tensor, kv_cache: LayerCache, slot_mapping: torch.Tensor
    ) -> None:
        """Writes those of states that are normalised already, which the layer computes no further."""
        self._attention.write_keys_and_values(x, positions, kv_cache, slot_mapping)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts."""
        return collect_slots(
            [
                self._mixer_norm,
                self._mixer,
                self._post_mixer_norm,
                self._mlp_norm,
                self._feed_forward,
                self._post_mlp_norm,
            ]
        )

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Scales of 8-bit keys and values."""
        return self._mixer.optional_slots()

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The feed-forward's output, and the residual that the next norm adds it to."""
        normed, residual = self._mixer_norm.add(hidden, residual)
        mixed = self._scale(self._mixer(normed, step))
        if self._post_mixer_norm is not None:
            mixed = self._post_mixer_norm(mixed)
        normed, residual = self._mlp_norm.add(mixed, step.metadata.of_queries(residual))
        fed = self._scale(self._feed_forward(normed))
        return fed if self._post_mlp_norm is None else self._post_mlp_norm(fed), residual
