"""Mamba-2: state spaces alone, without attention and feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_model_runner.layers.state_space import StateSpaceSettings
from llmstack_model_runner.models.bamba import check_state_space, read_step_limits
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.llama import Settings, read_llama
from llmstack_model_runner.models.nemotron_h import NemotronH, fold_blocks

# What attention would need.
_NO_ATTENTION = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1}
_NO_LIMIT = 1 << 30
"""Positions of a configuration that names none."""


class Mamba2(NemotronH):
    """`Mamba2ForCausalLM`, such as Codestral Mamba; its tensors are named as those of Nemotron-H.

    Residuals are of the model's type, whatever `residual_in_fp32` says.
    """

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        settings = read_stateful(config)
        kinds = ["linear_attention"] * len(settings.layers)
        layers = fold_blocks(replace(settings.layers[0], rope=None), kinds, _read_state_space(config))
        return replace(settings, layers=layers)


def read_stateful(config: Mapping[str, Any]) -> Settings:
    """Settings that models without attention share; their layers are Llama's as yet."""
    refuse(config, "hidden_act", "silu")
    eps = read_float(config, "layer_norm_epsilon", 1e-5)
    num_positions = read_int(config, "max_position_embeddings", _NO_LIMIT)
    fields = {**_NO_ATTENTION, "rms_norm_eps": eps, "max_position_embeddings": num_positions}
    return read_llama({**config, **fields})


def _read_state_space(config: Mapping[str, Any]) -> StateSpaceSettings:
    has_bias = read_bool(config, "use_bias", False)
    settings = StateSpaceSettings(
        num_heads=read_int(config, "num_heads", 128),
        head_dim=read_int(config, "head_dim", 64),
        num_groups=read_int(config, "n_groups", 8),
        state_size=read_int(config, "state_size", 128),
        length=read_int(config, "conv_kernel", 4),
        has_projection_bias=has_bias,
        has_out_bias=has_bias,
        has_convolution_bias=read_bool(config, "use_conv_bias", True),
        limits=read_step_limits(config),
        name="mixer",
    )
    if settings.inner_size != read_int(config, "expand", 2) * read_int(config, "hidden_size"):
        raise ValueError(f"config.json: {settings.num_heads} heads of {settings.head_dim} are not the inner size.")
    return check_state_space(settings)
