"""Jamba: state spaces of Mamba-1 beside attention, with experts in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.layers.experts import ExpertSettings
from llmstack_model_runner.layers.selective_space import SelectiveSettings
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.mamba import read_rank
from llmstack_model_runner.models.mixture_of_experts import StackedExpertWeights, read_expert_numbers
from llmstack_model_runner.models.state_layer import HybridModel, mix_layers

_NAMES: Mapping[str, str] = {
    ".feed_forward.router.": ".mlp.gate.",
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}


class Jamba(StackedExpertWeights, HybridModel):
    """`JambaForCausalLM`: attention in every n-th layer, and experts in every n-th of all layers."""

    renamed: ClassVar[Mapping[str, str]] = _NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "hidden_act", "silu")
        refuse(config, "sliding_window")
        num_kv_heads = read_int(config, "num_key_value_heads", 8)
        settings = read_llama({**config, "num_key_value_heads": num_kv_heads, "head_dim": None})
        layers = [replace(layer, rope=None) for layer in settings.layers]
        numbers = range(len(layers))
        have_attention = [number in _places(config, "attn", (8, 4), numbers) for number in numbers]
        layers = mix_layers(layers, _read_state_space(config), have_attention)
        experts = _read_experts(config)
        if experts is not None:
            with_experts = _places(config, "expert", (2, 1), numbers)
            layers = [replace(own, experts=experts) if n in with_experts else own for n, own in enumerate(layers)]
        return replace(settings, layers=layers)


def _places(config: Mapping[str, Any], kind: str, defaults: tuple[int, int], numbers: range) -> range:
    """Numbers of the layers of a kind, which come in every period at the same place."""
    period = read_int(config, f"{kind}_layer_period", defaults[0])
    offset = read_int(config, f"{kind}_layer_offset", defaults[1], least=0)
    if offset >= period:
        raise ValueError(f"config.json: {kind}_layer_offset {offset} must be less than {kind}_layer_period {period}.")
    return range(offset, numbers.stop, period)


def _read_experts(config: Mapping[str, Any]) -> ExpertSettings | None:
    """Experts whose shares do not sum to 1; None where each layer has a feed-forward."""
    if read_int(config, "num_experts", read_int(config, "num_local_experts", 16)) == 1:
        return None
    numbers = read_expert_numbers(config, 16, 2)
    return ExpertSettings(*numbers, inner_size=read_int(config, "intermediate_size"), is_normalised=False)


def _read_state_space(config: Mapping[str, Any]) -> SelectiveSettings:
    settings = SelectiveSettings(
        inner_size=read_int(config, "mamba_expand", 2) * read_int(config, "hidden_size"),
        state_size=read_int(config, "mamba_d_state", 16),
        rank=read_rank(config, "mamba_dt_rank"),
        length=read_int(config, "mamba_d_conv", 4),
        has_projection_bias=read_bool(config, "mamba_proj_bias", False),
        has_convolution_bias=read_bool(config, "mamba_conv_bias", True),
        norms="scaled",
        norm_eps=read_float(config, "rms_norm_eps", 1e-6),
        name="mamba",
    )
    return settings.check()
