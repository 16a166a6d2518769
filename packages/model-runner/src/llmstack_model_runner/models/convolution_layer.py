"""A layer with a short convolution in place of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_model_runner.layers import AttentionPlans, RMSNorm, WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerCache
from llmstack_model_runner.layers.sharding import sharding
from llmstack_model_runner.layers.short_convolution import ShortConvolution
from llmstack_model_runner.models.kv_spec import LayerKVSpec, one_state
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings, make_feed_forward


@dataclass(frozen=True, slots=True)
class ConvolutionLayerSettings(LlamaLayerSettings):
    """Sizes of a layer with a convolution; what `LlamaLayerSettings` says of attention has no effect.

    Attributes:
        length: Inputs that the convolution takes, the token's own included; at least 2.
        has_bias: The convolution and its projections have biases.
    """

    length: int = 3
    has_bias: bool = False

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec:
        """The inputs before the next token, of this rank's channels."""
        shape = (self.length - 1, len(sharding().share(self.hidden_size)))
        return one_state("convolution_tail", shape, str(dtype).removeprefix("torch."))


class ConvolutionLayer:
    """Gated short convolution and gated feed-forward or experts, each after a norm and added to the residual."""

    def __init__(
        self, prefix: str, settings: ConvolutionLayerSettings, dtype: torch.dtype, device: torch.device
    ) -> None:
        size, eps = settings.hidden_size, settings.eps
        self._convolution_norm = RMSNorm(f"{prefix}input_layernorm", size, eps, dtype=dtype, device=device)
        self._convolution = ShortConvolution(
            f"{prefix}conv.", size, settings.length, has_bias=settings.has_bias, dtype=dtype, device=device
        )
        self._mlp_norm = RMSNorm(f"{prefix}post_attention_layernorm", size, eps, dtype=dtype, device=device)
        self._feed_forward = make_feed_forward(prefix, settings, dtype, device)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._convolution_norm, self._convolution, self._mlp_norm, self._feed_forward])

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
        (tails,) = kv_cache
        normed, residual = self._convolution_norm.add(hidden, residual)
        normed, residual = self._mlp_norm.add(self._convolution(normed, tails, metadata), residual)
        return self._feed_forward(normed), residual
