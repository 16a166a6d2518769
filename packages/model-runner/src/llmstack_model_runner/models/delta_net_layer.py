"""A layer with a gated delta net in place of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_model_runner.layers import AttentionPlans, RMSNorm, WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerCache
from llmstack_model_runner.layers.delta_net import DeltaNet, DeltaNetSettings
from llmstack_model_runner.models.kv_spec import LayerKVSpec, StateTensor
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings, make_feed_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetLayerSettings(LlamaLayerSettings):
    """Sizes of a layer with a delta net; what `LlamaLayerSettings` says of attention has no effect."""

    delta_net: DeltaNetSettings

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec:
        """The inputs before the next token and the matrices, of this rank's heads."""
        own = self.delta_net.of_rank()
        tail = (own.length - 1, own.num_channels)
        matrices = (own.num_heads, own.key_dim, own.value_dim)
        states = (
            StateTensor("last_inputs", tail, str(dtype).removeprefix("torch.")),
            StateTensor("delta_matrices", matrices, "float32"),
        )
        return LayerKVSpec(kind="state", states=states)


class DeltaNetLayer:
    """Delta net and feed-forward, each after a norm and added to the residual."""

    def __init__(self, prefix: str, settings: DeltaNetLayerSettings, dtype: torch.dtype, device: torch.device) -> None:
        size, eps = settings.hidden_size, settings.eps
        self._norms = [
            RMSNorm(prefix + name, size, eps, dtype=dtype, device=device, is_offset=settings.is_norm_offset)
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        self._delta_net = DeltaNet(f"{prefix}linear_attn.", size, settings.delta_net, eps, dtype, device)
        self._feed_forward = make_feed_forward(prefix, settings, dtype, device)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all parts."""
        return collect_slots([*self._norms, self._delta_net, self._feed_forward])

    def optional_slots(self) -> dict[str, WeightSlot]:
        """None: there are no keys and values to scale."""
        return {}

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
        before, between = self._norms
        normed, residual = before.add(hidden, residual)
        normed, residual = between.add(self._delta_net(normed, kv_cache, metadata), residual)
        return self._feed_forward(normed), residual
