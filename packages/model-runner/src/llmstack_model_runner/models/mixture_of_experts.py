"""Mixtures of experts of the Llama family: Mixtral and Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.models.config_values import read_bool, read_int
from llmstack_model_runner.models.llama import Llama, Qwen3, Settings, read_llama


class Mixtral(Llama):
    """`MixtralForCausalLM`: experts in every layer with weights that sum to 1; one sliding window for all layers."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
        experts = ExpertSettings(
            *read_expert_numbers(config, 8, 2),
            inner_size=read_int(config, "intermediate_size"),
            is_normalised=True,
            name="block_sparse_moe",
            gate_name="w1",
            up_name="w3",
            down_name="w2",
        )
        return read_llama({"rms_norm_eps": 1e-5, **config}, window, experts=experts)


class Qwen3Moe(Qwen3):
    """`Qwen3MoeForCausalLM`: Qwen 3 with experts in every layer or every n-th; one sliding window for all layers."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        # Without a head size it is that of the heads, not Qwen 3's.
        settings = super().read_settings({"head_dim": None, **config, "layer_types": None, "max_window_layers": 0})
        experts = ExpertSettings(
            *read_expert_numbers(config, 128, 8),
            inner_size=read_int(config, "moe_intermediate_size", 768),
            is_normalised=read_bool(config, "norm_topk_prob", False),
        )
        step, dense = read_int(config, "decoder_sparse_step", 1), _read_dense_layers(config)
        layers = [
            layer if index in dense or (index + 1) % step else replace(layer, experts=experts)
            for index, layer in enumerate(settings.layers)
        ]
        return replace(settings, layers=layers)


def read_expert_numbers(config: Mapping[str, Any], num_experts: int, num_choices: int) -> tuple[int, int]:
    """Number of experts, under either name that transformers writes, and number of experts per token."""
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    num_experts = read_int(config, name, num_experts)
    num_choices = read_int(config, "num_experts_per_tok", num_choices)
    if num_choices > num_experts:
        raise ValueError(f"config.json: num_experts_per_tok is {num_choices}, and there are {num_experts} experts.")
    return num_experts, num_choices


def _read_dense_layers(config: Mapping[str, Any]) -> list[int]:
    layers = config.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise ValueError(f"config.json: mlp_only_layers must be a list of integers, got {str(layers)[:64]}.")
    return layers
