"""Bamba: state spaces of Mamba-2 beside attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.layers.state_space import StateSpaceSettings
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.state_layer import HybridModel, mix_layers, read_layer_kinds

_NAMES: Mapping[str, str] = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}


class Bamba(HybridModel):
    """`BambaForCausalLM`: a few layers with attention, by their numbers."""

    renamed: ClassVar[Mapping[str, str]] = _NAMES

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        has_bias = read_bool(config, "attention_bias", False)
        settings = read_llama(
            {**config, "rms_norm_eps": read_float(config, "rms_norm_eps", 1e-5), "partial_rotary_factor": 0.5},
            is_partly_rotated=True,
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_mlp_bias=read_bool(config, "mlp_bias", False),
        )
        numbers, num_layers = config.get("attn_layer_indices") or [], len(settings.layers)
        kinds = ["full_attention" if number in numbers else "mamba" for number in range(num_layers)]
        kinds_by_number = read_layer_kinds(kinds, num_layers, "mamba")
        return replace(settings, layers=mix_layers(settings.layers, read_state_space(config), kinds_by_number))


def read_state_space(config: Mapping[str, Any], inner_size: int | None = None) -> StateSpaceSettings:
    """The fields `mamba_…` of a configuration; `inner_size` is a multiple of the hidden size if None."""
    refuse(config, "hidden_act", "silu")
    if inner_size is None:
        inner_size = read_int(config, "mamba_expand", 2) * read_int(config, "hidden_size")
    num_heads = read_int(config, "mamba_n_heads", 128)
    head_dim = config.get("mamba_d_head", "auto")
    head_dim = inner_size // num_heads if head_dim in (None, "auto") else read_int(config, "mamba_d_head")
    if head_dim * num_heads != inner_size:
        raise ValueError(f"config.json: {num_heads} mamba heads of {head_dim} are not the inner size {inner_size}.")
    settings = StateSpaceSettings(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=read_int(config, "mamba_n_groups", 1),
        state_size=read_int(config, "mamba_d_state", 256),
        length=read_int(config, "mamba_d_conv", 4),
        has_projection_bias=read_bool(config, "mamba_proj_bias", False),
        has_out_bias=read_bool(config, "mamba_proj_bias", False),
        has_convolution_bias=read_bool(config, "mamba_conv_bias", True),
        limits=read_step_limits(config),
    )
    return check_state_space(settings)


def check_state_space(settings: StateSpaceSettings) -> StateSpaceSettings:
    """The settings; ValueError if heads cannot share groups, or the convolution has no earlier input."""
    if settings.num_heads % settings.num_groups:
        raise ValueError(
            f"config.json: {settings.num_heads} mamba heads cannot share {settings.num_groups} mamba groups."
        )
    if settings.length < 2:
        raise ValueError(
            f"config.json: the convolution of mamba must have a length of at least 2, got {settings.length}."
        )
    return settings


def read_step_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Least and largest step, which are 0 and infinity in all published checkpoints."""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise ValueError(f"config.json: time_step_limit must be two numbers, got {str(limits)[:64]}.")
    least, largest = (read_float({"time_step_limit": limit}, "time_step_limit", 0.0) for limit in limits)
    if least > largest:
        raise ValueError(f"config.json: time_step_limit must be ascending, got {str(limits)[:64]}.")
    return least, largest
