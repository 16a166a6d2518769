"""GLM 4.5 to 4.7: experts of DeepSeek V3, and heads that are rotated in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_model_runner.models.config_values import read_bool, read_int
from llmstack_model_runner.models.deepseek import read_routed_experts, read_routing
from llmstack_model_runner.models.layers_behind import LayersBehind
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights

# Defaults of transformers for fields that a configuration omits.
_DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip


class Glm4Moe(StackedExpertWeights, LayersBehind):
    """`Glm4MoeForCausalLM`: GLM 4.5, 4.5 Air, 4.6 and 4.7."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        config = {**config, **{name: value for name, value in _DEFAULTS.items() if config.get(name) is None}}
        settings = read_llama(
            config,
            is_partly_rotated=True,
            has_qkv_bias=read_bool(config, "attention_bias", False),
            has_qk_norm=read_bool(config, "use_qk_norm", False),
        )
        experts = read_routed_experts(config, read_routing(config))
        num_dense = read_int(config, "first_k_dense_replace", least=0)
        layers = [
            layer if number < num_dense else replace(layer, experts=experts)
            for number, layer in enumerate(settings.layers)
        ]
        return replace(settings, layers=layers)
