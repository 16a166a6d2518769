"""One block of Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llmstack_kernels.activation import gelu_tanh
from llmstack_kernels.rotary_embedding import rotary_embedding
from llmstack_model_runner.layers import (
    Attention,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    WeightSlot,
    collect_slots,
)
from llmstack_model_runner.layers.attention_metadata import LayerOutput, LayerStep
from llmstack_model_runner.layers.experts import Experts, ExpertSettings
from llmstack_model_runner.layers.head_split import HeadSplit
from llmstack_model_runner.layers.mixer import Mixer
from llmstack_model_runner.layers.scale import Scale
from llmstack_model_runner.layers.weight_slot import WeightKind
from llmstack_model_runner.models.kv_spec import LayerKVSpec
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayer, LlamaLayerSettings


@dataclass(frozen=True, slots=True)
class Gemma4LayerSettings(LlamaLayerSettings):
    """Sizes and variants of one block.

    Attributes:
        source: The earlier layer whose keys and values the layer reads; None for a layer with its own.
        input_size: Width of the tokens' vectors that the layer adds; 0 for none.
        own_experts: Experts beside the feed-forward, or None.
    """

    source: int | None = None
    input_size: int = 0
    own_experts: ExpertSettings | None = None

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec | None:
        """The shape of its keys and values; None for a layer that reads those of an earlier layer."""
        return None if self.source is not None else LlamaLayerSettings.kv_spec(self, dtype)

    def make_mixer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> Mixer:
        """Its attention, without weights."""
        if self.source is None or rotary is None:
            return LlamaLayerSettings.make_mixer(self, prefix, rotary, dtype, device)
        return ReadingAttention(f"{prefix}self_attn.", self, rotary, dtype, device)

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The layer of this number, without weights."""
        return Gemma4Layer(f"model.layers.{number}.", self, rotary, dtype, device)


class ReadingAttention(Mixer):
    """Attention over the keys and values of an earlier layer: it has queries alone."""

    def __init__(
        self,
        prefix: str,
        settings: LlamaLayerSettings,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of the attention's tensors."""
        split = HeadSplit(settings.num_heads, settings.num_kv_heads, settings.head_dim)
        size, head_dim, name = settings.hidden_size, settings.head_dim, f"{prefix}q_proj"
        self._query = Linear(
            size,
            {name: settings.num_heads * head_dim},
            has_bias=settings.has_qkv_bias,
            dtype=dtype,
            device=device,
            part_to_outputs={name: [split.inputs]},
        )
        self._norm, self._rotary = settings.norm(f"{prefix}q_norm", head_dim, dtype, device), rotary
        scale = settings.scale or head_dim**-0.5
        self.attention = Attention(
            len(split.heads), len(split.kv_heads), head_dim, scale, settings.sliding_window, device=device
        )
        self._out = Linear(
            settings.num_heads * head_dim,
            {f"{prefix}o_proj": size},
            has_bias=settings.has_attention_out_bias,
            dtype=dtype,
            device=device,
            inputs=split.inputs,
        )

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of both projections and of the norm."""
        return collect_slots([self._query, self._norm, self._out])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """The projected output of attention. Nothing is written."""
        query = self._norm(self._query(x).view(len(x), -1, self.attention.head_dim))
        query, _ = rotary_embedding(step.positions, query, query[:, :0], self._rotary.table)
        return self._out(self.attention.read(query, step))


class Gemma4Layer(LlamaLayer):
    """A block with norms before and behind its parts, whose output is scaled by a number of its own.

    Experts see the residual, as the feed-forward beside them does, each behind norms of its own.
    """

    def __init__(
        self,
        prefix: str,
        settings: Gemma4LayerSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(prefix, settings, rotary, dtype, device)
        self._name, self._device, self._out_scale = f"{prefix}layer_scalar", device, Scale(1.0, device)
        self._has_window = settings.sliding_window is not None
        self._experts: _ExpertsBeside | None = None
        if settings.own_experts is not None:
            self._experts = _ExpertsBeside(prefix, settings, settings.own_experts, dtype, device)
        self._add_input = _AddedInput(prefix, settings, dtype, device) if settings.input_size else None

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts, and of the block's scale."""
        own = {self._name: WeightSlot((1,), self._load_scale, WeightKind.SCALE)}
        return own | super().slots() | collect_slots([self._experts, self._add_input])

    def read_scales_of(self, source: LlamaLayer) -> None:
        """Stored keys and values have the scales of the layer that writes them."""
        if isinstance(self._mixer, ReadingAttention):
            self._mixer.attention.kv_scales = source.kv_scales

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """Computes the layer as others do, without vectors of the tokens."""
        return self.compute(hidden, residual, step, None)

    def compute(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        residual: torch.Tensor | None,
        step: LayerStep,
        token_input: torch.Tensor | None,  # [num_tokens, input_size]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's output without the residual, and the residual, both scaled."""
        normed, residual = self._mixer_norm.add(hidden, residual)
        if step.metadata.vectors is not None and not self._has_window:
            # Here a picture's tokens see no later ones of it.
            step = step._replace(metadata=replace(step.metadata, vectors=None))
        mixed = _normed(self._post_mixer_norm, self._mixer(normed, step))
        normed, residual = self._mlp_norm.add(mixed, step.metadata.of_queries(residual))
        fed = self._feed_forward(normed)
        if self._experts is not None:
            fed = self._experts.add(fed, residual)
        fed = _normed(self._post_mlp_norm, fed)
        if self._add_input is not None and token_input is not None:
            residual = residual + fed
            fed = self._add_input(residual, step.metadata.of_queries(token_input))
        return self._out_scale(fed), self._out_scale(residual)

    def _load_scale(self, tensor: torch.Tensor) -> None:
        self._out_scale = Scale(tensor.float(), self._device)


def _normed(norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class _AddedInput:
    """The addition to the residual by the token itself: norm(projection(gelu(gate(x)) * input))."""

    def __init__(self, prefix: str, settings: Gemma4LayerSettings, dtype: torch.dtype, device: torch.device) -> None:
        size, input_size = settings.hidden_size, settings.input_size
        gate, projection = {f"{prefix}per_layer_input_gate": input_size}, {f"{prefix}per_layer_projection": size}
        self._gate = Linear(size, gate, has_bias=False, dtype=dtype, device=device)
        self._projection = Linear(input_size, projection, has_bias=False, dtype=dtype, device=device)
        self._norm = settings.norm(f"{prefix}post_per_layer_input_norm", size, dtype, device)

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of both projections and of the norm."""
        return collect_slots([self._gate, self._projection, self._norm])

    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        token_input: torch.Tensor,  # [num_tokens, input_size]
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """The addition to `x`."""
        return self._norm(self._projection(gelu_tanh(self._gate(x)) * token_input))


class _ExpertsBeside:
    """Experts beside a feed-forward: norms before and behind them, and behind the feed-forward."""

    def __init__(
        self,
        prefix: str,
        settings: Gemma4LayerSettings,
        experts: ExpertSettings,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size = settings.hidden_size
        self._dense_norm, self._norm, self._input_norm = (
            settings.norm(f"{prefix}{name}", size, dtype, device)
            for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        )
        self._router_norm = RMSNorm(
            f"{prefix}router.scale", size, settings.eps, dtype=torch.float32, device=device, has_scale=False
        )
        self._scale_name, self._size = f"{prefix}router.scale", size
        self._experts = Experts(prefix, size, settings.activation, experts, dtype, device)

    def slots(self) -> dict[str, WeightSlot]:
        """The weight slots of the experts, of the norms, and of the router's factors."""
        scale = {self._scale_name: WeightSlot((self._size,), self._load_scale, WeightKind.SCALE)}
        return scale | collect_slots([self._dense_norm, self._norm, self._input_norm, self._experts])

    def add(self, fed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The output of the feed-forward and that of the experts over the residual: [num_tokens, size] to the same."""
        chosen = self._experts(self._input_norm(residual), self._router_norm(residual))
        return self._dense_norm(fed) + self._norm(chosen)

    def _load_scale(self, tensor: torch.Tensor) -> None:
        self._router_norm.weight.copy_(tensor.float() * self._size**-0.5)
