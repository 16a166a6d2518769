"""Mamba and Falcon Mamba: state spaces of Mamba-1 alone, without attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from llmstack_model_runner.layers.selective_space import SelectiveSettings
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.llama import Settings
from llmstack_model_runner.models.mamba2 import read_stateful
from llmstack_model_runner.models.nemotron_h import NemotronH, fold_blocks


class Mamba(NemotronH):
    """`MambaForCausalLM`; its tensors are named as those of Nemotron-H.

    Residuals are of the model's type, whatever `residual_in_fp32` says.
    """

    norms: ClassVar[Literal["none", "plain"]] = "none"

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        settings = read_stateful({**config, "tie_word_embeddings": read_bool(config, "tie_word_embeddings", True)})
        kinds = ["linear_attention"] * len(settings.layers)
        state = replace(read_selective(config), norms=cls.norms, norm_eps=read_float(config, "mixer_rms_eps", 1e-6))
        return replace(settings, layers=fold_blocks(replace(settings.layers[0], rope=None), kinds, state))


class FalconMamba(Mamba):
    """`FalconMambaForCausalLM`: what steps, B and C are made of is normalised, without scales."""

    norms: ClassVar[Literal["none", "plain"]] = "plain"


def read_selective(config: Mapping[str, Any]) -> SelectiveSettings:
    """The fields of a state space."""
    hidden_size = read_int(config, "hidden_size")
    settings = SelectiveSettings(
        inner_size=read_int(config, "expand", 2) * hidden_size,
        state_size=read_int(config, "state_size", 16),
        rank=read_rank(config, "time_step_rank"),
        length=read_int(config, "conv_kernel", 4),
        has_projection_bias=read_bool(config, "use_bias", False),
        has_convolution_bias=read_bool(config, "use_conv_bias", True),
    )
    refuse(config, "intermediate_size", settings.inner_size)
    return settings.check()


def read_rank(config: Mapping[str, Any], name: str) -> int:
    """Numbers that steps are made of: a sixteenth of the hidden size, unless the field says so."""
    automatic = -(-read_int(config, "hidden_size") // 16)
    return automatic if config.get(name) == "auto" else read_int(config, name, automatic)
