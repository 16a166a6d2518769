"""MiniMax-Text-01: lightning attention beside attention, with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers import RotaryEmbedding
from llmstack_model_runner.layers.attention_metadata import LayerOutput, LayerStep
from llmstack_model_runner.layers.lightning_attention import LightningSettings
from llmstack_model_runner.layers.mixer import Mixer
from llmstack_model_runner.layers.scale import Scale
from llmstack_model_runner.models.config_values import read_float, read_int, refuse
from llmstack_model_runner.models.kv_spec import LayerKVSpec, keys_and_values
from llmstack_model_runner.models.llama import Settings
from llmstack_model_runner.models.llama_layer import DecoderLayer, LlamaLayer, LlamaLayerSettings
from llmstack_model_runner.models.mixture_of_experts import Mixtral, StackedExpertWeights
from llmstack_model_runner.models.state_layer import HybridModel, mix_layer, read_layer_kinds

# What transformers 5 and stacks of experts call the tensors.
_NAMES: Mapping[str, str] = {
    ".mlp.": ".block_sparse_moe.",
    ".gate_proj.": ".w1.",
    ".down_proj.": ".w2.",
    ".up_proj.": ".w3.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxLayerSettings(LlamaLayerSettings):
    """Sizes of a block.

    Attributes:
        lightning: Those of what it has in place of attention; None for attention.
        mixer_factors: Factors of the normalised input and of the output, whose sum is normalised next.
        mlp_factors: The same behind the experts.
    """

    lightning: LightningSettings | None
    mixer_factors: tuple[float, float]
    mlp_factors: tuple[float, float]

    def kv_spec(self, dtype: torch.dtype) -> LayerKVSpec:
        """Keys and values, or the state."""
        if self.lightning is None:
            return keys_and_values(self.num_kv_heads, self.head_dim, self.sliding_window)
        return LayerKVSpec(kind="state", states=self.lightning.states(dtype))

    def make_mixer(
        self, prefix: str, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> Mixer:
        """The attention of the layer, or the mixer in its place."""
        if self.lightning is None:
            return LlamaLayerSettings.make_mixer(self, prefix, rotary, dtype, device)
        return self.lightning.make(prefix, self.hidden_size, self.eps, dtype, device)

    def make_layer(
        self, number: int, rotary: RotaryEmbedding | None, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        """The layer of this number, without weights."""
        return MiniMaxLayer(f"model.layers.{number}.", self, rotary, dtype, device)


class MiniMaxLayer(LlamaLayer):
    """A block whose residuals are the normalised inputs of its parts."""

    def __init__(
        self,
        prefix: str,
        settings: MiniMaxLayerSettings,
        rotary: RotaryEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(prefix, settings, rotary, dtype, device)
        self._mixer_scales, self._mlp_scales = (
            [Scale(factor, device) for factor in factors] for factors in (settings.mixer_factors, settings.mlp_factors)
        )

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, step: LayerStep) -> LayerOutput:
        """The experts' scaled output, and the scaled input that the next norm adds it to."""
        normed, _ = self._mixer_norm.add(hidden, residual)
        mixed = self._mixer(normed, step)
        keep, add = self._mixer_scales
        normed, _ = self._mlp_norm.add(add(mixed), keep(step.metadata.of_queries(normed)))
        keep, add = self._mlp_scales
        return add(self._feed_forward(normed)), keep(normed)


class MiniMax(StackedExpertWeights, HybridModel):
    """`MiniMaxForCausalLM`; its experts are named as Mixtral's."""

    renamed: ClassVar[Mapping[str, str]] = _NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "hidden_act", "silu")
        num_kv_heads = read_int(config, "num_key_value_heads", 8)
        others = {
            "num_key_value_heads": num_kv_heads,
            "layer_types": None,
            "max_window_layers": 0,
        }  # one window for all
        settings = Mixtral.read_settings({**config, **others})
        num_layers, layer = len(settings.layers), settings.layers[0]
        kinds = read_layer_kinds(_layer_types(config, num_layers), num_layers, "linear_attention")
        layers: list[LlamaLayerSettings] = []
        for number, has_attention in enumerate(kinds):
            depth = number / (num_layers - 1 + 1e-5)
            lightning = LightningSettings(layer.num_heads, layer.head_dim, depth)
            name = "full_attn" if has_attention else "linear_attn"
            layers.append(
                mix_layer(
                    MiniMaxLayerSettings,
                    layer,
                    lightning=None if has_attention else lightning,
                    mixer_factors=_factors(config, name),
                    mlp_factors=_factors(config, "mlp"),
                )
            )
        return replace(settings, layers=layers)

    def is_ignored(self, name: str) -> bool:
        """Factors that follow from the numbers of heads and layers."""
        return name.endswith(("slope_rate", "query_decay", "key_decay", "diagonal_decay")) or super().is_ignored(name)


def _layer_types(config: Mapping[str, Any], num_layers: int) -> object:
    kinds = config.get("layer_types")
    if kinds is None:
        return [("linear" if number % 2 else "full") + "_attention" for number in range(num_layers)]
    return kinds


def _factors(config: Mapping[str, Any], name: str) -> tuple[float, float]:
    alpha, beta = (read_float(config, f"{name}_{letter}_factor", 1.0) for letter in ("alpha", "beta"))
    return alpha, beta
