"""Granite 4: state spaces of Mamba-2 beside attention, dense or with experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.weight_slot import AnyWeight
from llmstack_model_runner.models.bamba import read_state_space
from llmstack_model_runner.models.config_values import is_of_gguf, read_int
from llmstack_model_runner.models.granite import ScaledInputs, read_granite
from llmstack_model_runner.models.llama import Settings
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights, read_expert_numbers
from llmstack_model_runner.models.state_layer import HybridModel, mix_layers, read_layer_kinds

_KINDS: Mapping[str, str] = {"attention": "full_attention", "mamba": "linear_attention"}  # older names
# transformers 5 has other names than the hub.
_EXPERT_NAMES: Mapping[str, str] = {
    ".input_linear.weight": ".experts.gate_up_proj",
    ".output_linear.weight": ".experts.down_proj",
    ".router.layer.weight": ".gate.weight",
    ".router.weight": ".gate.weight",
}


class GraniteHybrid(StackedExpertWeights, ScaledInputs, HybridModel):
    """`GraniteMoeHybridForCausalLM`: Granite 4 H, and the Granite 4 models of attention alone."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self._has_experts = _has_experts(config)

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        settings = read_granite(
            {**config, "intermediate_size": read_int(config, "shared_intermediate_size", 1024)},
            has_joined_gate=not is_of_gguf(config),
            experts=_read_experts(config) if _has_experts(config) else None,
        )
        layers, kinds = settings.layers, config.get("layer_types") or config.get("layers_block_type")
        if config.get("position_embedding_type") != "rope":
            layers = [replace(layer, rope=None) for layer in layers]
        if kinds is None:
            kinds = ["linear_attention"] * len(layers)
        kinds = [_KINDS.get(str(kind), kind) for kind in kinds] if isinstance(kinds, list) else kinds
        have_attention = read_layer_kinds(kinds, len(layers), "linear_attention")
        if all(have_attention):
            return replace(settings, layers=layers)
        return replace(settings, layers=mix_layers(layers, read_state_space(config), have_attention))

    def load_weights(self, weights: Iterable[tuple[str, AnyWeight]]) -> None:
        """Loads all tensors. A tensor of all experts of a layer is read as one tensor per expert."""
        super().load_weights((_expert_name(name), weight) for name, weight in weights)

    def rename(self, name: str) -> str:
        """The name that the Llama family has for a tensor."""
        shared = "block_sparse_moe.shared_experts" if self._has_experts else "mlp"
        for part, ours in {"input_linear": "gate_up_proj", "output_linear": "down_proj"}.items():
            name = name.replace(f".shared_mlp.{part}.", f".{shared}.{ours}.")
        return name


def _expert_name(name: str) -> str:
    layer, part, rest = name.partition(".block_sparse_moe.")
    return f"{layer}{part[:-1]}{_EXPERT_NAMES.get(f'.{rest}', f'.{rest}')}" if part else name


def _has_experts(config: Mapping[str, Any]) -> bool:
    return read_int(config, "num_local_experts", 8, least=0) > 0


def _read_experts(config: Mapping[str, Any]) -> ExpertSettings:
    """Experts beside a shared one, with weights that sum to 1."""
    return ExpertSettings(
        *read_expert_numbers({**config, "num_experts": None}, 8, 2),
        inner_size=read_int(config, "intermediate_size"),
        is_normalised=True,
        name="block_sparse_moe",
        shared_size=read_int(config, "shared_intermediate_size", 1024),
    )
