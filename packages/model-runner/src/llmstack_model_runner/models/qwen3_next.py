"""Qwen3-Next and Qwen 3.5: gated delta nets between layers with attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_model_runner.layers.delta_net import DeltaNetSettings, Joins
from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.models.config_values import is_of_gguf, read_bool, read_int, refuse
from llmstack_model_runner.models.draft_head import HeadNames
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights, read_dense_layers, read_expert_numbers
from llmstack_model_runner.models.state_layer import HybridModel, mix_layers, read_layer_kinds

# Defaults of transformers for fields that a configuration omits.
_DEFAULTS: Mapping[str, Any] = {"head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25}


class Qwen3_5(HybridModel):
    """`Qwen3_5ForCausalLM`: the dense models of Qwen 3.5 and 3.6."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        return _read_settings(config, "none")

    @classmethod
    def draft_head_names(cls, num_layers: int) -> HeadNames:
        return HeadNames(
            layer="mtp.layers.0.", embedding_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden",
            join="mtp.fc", norm="mtp.norm",
        )  # fmt: skip

    def is_ignored(self, name: str) -> bool:
        """Layers that predict several tokens at once are read for drafts alone."""
        return name.startswith("mtp.") or super().is_ignored(name)


class Qwen3_5Moe(StackedExpertWeights, Qwen3_5):
    """`Qwen3_5MoeForCausalLM`: Qwen 3.5 and 3.6 with experts in every layer."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        settings = _read_settings({"intermediate_size": 1, **config}, "none")
        experts = _read_experts(config, 256, 8, is_normalised=True)
        return replace(settings, layers=[replace(layer, experts=experts) for layer in settings.layers])


class Qwen3Next(StackedExpertWeights, Qwen3_5):
    """`Qwen3NextForCausalLM`: experts in every layer or every n-th."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        is_joined = not is_of_gguf(config) or read_bool(config, "has_joined_delta_inputs", False)
        joins: Joins = "all" if is_joined else "gates"
        settings = _read_settings({"intermediate_size": 5632, **config}, joins)
        experts = _read_experts(config, 512, 10, is_normalised=read_bool(config, "norm_topk_prob", True))
        step, dense = read_int(config, "decoder_sparse_step", 1), read_dense_layers(config)
        layers = [
            layer if index in dense or (index + 1) % step else replace(layer, experts=experts)
            for index, layer in enumerate(settings.layers)
        ]
        return replace(settings, layers=layers)


def _read_settings(config: Mapping[str, Any], joins: Joins) -> Settings:
    """All layers, without experts."""
    refuse(config, "hidden_act", "silu")
    refuse(config, "attn_output_gate", True)
    has_bias = read_bool(config, "attention_bias", False)
    settings = read_llama(
        {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}},
        is_partly_rotated=True,
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
        has_qk_norm=True,
        is_norm_offset=True,
        has_output_gate=True,
    )
    delta_net = DeltaNetSettings(
        num_key_heads=read_int(config, "linear_num_key_heads", 16),
        num_heads=read_int(config, "linear_num_value_heads", 32),
        key_dim=read_int(config, "linear_key_head_dim", 128),
        value_dim=read_int(config, "linear_value_head_dim", 128),
        length=read_int(config, "linear_conv_kernel_dim", 4),
        joins=joins,
        is_tiled=joins == "none" and is_of_gguf(config),
    )
    kinds = _have_attention(config, len(settings.layers))
    return replace(settings, layers=mix_layers(settings.layers, delta_net.check(), kinds))


def _read_experts(
    config: Mapping[str, Any], num_experts: int, num_choices: int, *, is_normalised: bool
) -> ExpertSettings:
    return ExpertSettings(
        *read_expert_numbers(config, num_experts, num_choices),
        inner_size=read_int(config, "moe_intermediate_size", 512),
        is_normalised=is_normalised,
        gated_shared_size=read_int(config, "shared_expert_intermediate_size", 512),
    )


def _have_attention(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have attention, by `layer_types`, or every n-th one in older configurations."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = read_int(config, "full_attention_interval", 4)
        kinds = [("full" if (number + 1) % interval == 0 else "linear") + "_attention" for number in range(num_layers)]
    return read_layer_kinds(kinds, num_layers, "linear_attention")
