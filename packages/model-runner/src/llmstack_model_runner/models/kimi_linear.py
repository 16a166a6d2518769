"""Kimi Linear and Ling 3: Kimi Delta Attention beside latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.layers.kimi_delta import KimiDeltaSettings
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.deepseek import DeepseekLayerSettings, DeepseekV3, read_mixed
from llmstack_model_runner.models.llama import Settings
from llmstack_model_runner.models.llama_layer import LlamaLayerSettings
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights
from llmstack_model_runner.models.state_layer import SplitConvolutions, mix_layers, read_layer_kinds

# What these configurations call fields of DeepSeek's.
_FIELDS: Mapping[str, str] = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_KIMI_NAMES: Mapping[str, str] = {
    ".self_attn.forget_gate.": ".self_attn.",  # of transformers
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
_LING_NAMES: Mapping[str, str] = {
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".self_attn.forget_gate.": ".self_attn.",  # of transformers
    ".gate.expert_bias": ".gate.e_score_correction_bias",
    "model.word_embeddings.": "model.embed_tokens.",
}


class KimiLinear(StackedExpertWeights, SplitConvolutions, DeepseekV3):
    """`KimiLinearForCausalLM`: latent attention knows no positions."""

    renamed: ClassVar[Mapping[str, str]] = _KIMI_NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "moe_router_activation_func", "sigmoid")
        refuse(config, "mla_use_nope", True)
        fields = _deepseek_fields(config, {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446})
        net = config.get("linear_attn_config")
        net = net if isinstance(net, Mapping) else {}
        num_layers = read_int(config, "num_hidden_layers")
        settings = read_mixed(fields | {"rope_parameters": None, "rope_scaling": None}, num_dense=1)
        delta = KimiDeltaSettings(
            num_heads=read_int(net, "num_heads", read_int(config, "linear_num_heads", 32)),
            head_dim=read_int(net, "head_dim", read_int(config, "linear_head_dim", 128)),
            length=read_int(net, "short_conv_kernel_size", read_int(config, "linear_conv_kernel_dim", 4)),
            rank=read_int(net, "head_dim", read_int(config, "linear_head_dim", 128)),
            has_wide_speeds=True,
        )
        layers = [_without_positions(layer) for layer in settings.layers]
        kinds = read_layer_kinds(_kimi_kinds(config, net, num_layers), num_layers, "linear_attention")
        return replace(settings, layers=mix_layers(layers, delta.check(), kinds))


class BailingHybrid(StackedExpertWeights, SplitConvolutions, DeepseekV3):
    """`BailingHybridForCausalLM`: what a head of latent attention attends to is multiplied by a gate."""

    renamed: ClassVar[Mapping[str, str]] = _LING_NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        defaults = {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8}
        fields = _deepseek_fields({"rope_theta": 6e6, **config}, defaults) | {"rope_interleave": True}
        settings = read_mixed(fields, num_dense=2)
        lowest = read_float(config, "kda_lower_bound", -5.0) if read_bool(config, "kda_safe_gate", True) else None
        num_heads = read_int(config, "num_attention_heads")
        delta = KimiDeltaSettings(
            num_heads=num_heads,
            head_dim=read_int(config, "linear_head_dim", read_int(config, "head_dim", 128)),
            length=read_int(config, "short_conv_kernel_size", 4),
            rank=None,
            lowest=lowest,
        )
        layers = [_with_head_gates(layer) for layer in settings.layers]
        kinds = config.get("layer_types")
        if kinds is None:
            size = read_int(config, "layer_group_size", 6)
            kinds = [_kind((number + 1) % size == 0) for number in range(len(layers))]
        return replace(
            settings,
            layers=mix_layers(layers, delta.check(), read_layer_kinds(kinds, len(layers), "linear_attention")),
        )


def _deepseek_fields(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under DeepSeek's names; those that are null have their defaults."""
    given = {name: value for name, value in config.items() if value is not None}
    renamed = {ours: given[theirs] for theirs, ours in _FIELDS.items() if theirs in given}
    return {**defaults, "q_lora_rank": None, **given, **renamed}


def _kimi_kinds(config: Mapping[str, Any], net: Mapping[str, Any], num_layers: int) -> object:
    """By `layer_types`, or by numbers from 1 on in the hub's configurations."""
    numbers = net.get("full_attn_layers")
    if config.get("layer_types") is not None:
        return config["layer_types"]
    if isinstance(numbers, list) and net.get("kda_layers") is not None:
        return [_kind(number + 1 in numbers) for number in range(num_layers)]
    return [_kind(number > 0 and number % 4 == 0) for number in range(num_layers)]


def _kind(has_attention: bool) -> str:
    return "full_attention" if has_attention else "linear_attention"


def _without_positions(layer: LlamaLayerSettings) -> LlamaLayerSettings:
    return replace(layer, rope=None)


def _with_head_gates(layer: LlamaLayerSettings) -> LlamaLayerSettings:
    if not isinstance(layer, DeepseekLayerSettings):
        raise TypeError("the layer has no latent attention")
    return replace(layer, latent=replace(layer.latent, has_head_gates=True))
