"""gpt-oss: attention sinks, windows, experts with a clamped gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.layers.stacked_experts import StackedExpertSettings
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.llama import Llama, Settings, read_llama
from llmstack_model_runner.models.mixture_of_experts import read_expert_numbers

# Defaults of transformers for fields that a configuration omits.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Llama):
    """`GptOssForCausalLM`: gpt-oss 20b and 120b."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "hidden_act", "silu")
        complete = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
        if not (complete.get("rope_parameters") or complete.get("rope_scaling")):
            complete["rope_scaling"] = _YARN
        num_layers = read_int(complete, "num_hidden_layers")
        in_turns = ["full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)]
        experts = StackedExpertSettings(
            *read_expert_numbers(complete, 128, 4),
            inner_size=read_int(complete, "intermediate_size"),
            is_normalised=True,
            alpha=read_float(complete, "swiglu_alpha", 1.702),
            limit=read_float(complete, "swiglu_limit", 7.0),
        )
        has_bias = read_bool(complete, "attention_bias", True)
        has_windows = config.get("sliding_window", 0) is not None
        return read_llama(
            {"layer_types": in_turns, **complete},
            read_int(complete, "sliding_window") if has_windows else None,
            has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
            has_sinks=True,
            experts=experts,
        )

    def rename(self, name: str) -> str:
        """Quantized experts are read as layers, which end in `.weight`."""
        is_expert = name.endswith((".experts.gate_up_proj.weight", ".experts.down_proj.weight"))
        return name.removesuffix(".weight") if is_expert else name
