"""ERNIE 4.5: a Llama whose heads rotate neighbouring numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.models.config_values import read_bool
from llmstack_model_runner.models.llama import Llama, Settings, read_llama

# Defaults of transformers for fields that a configuration omits.
_DEFAULTS: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 500_000.0}


class Ernie(Llama):
    """`Ernie4_5ForCausalLM`: the dense model of 0.3B."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        return read_ernie(config)


def read_ernie(config: Mapping[str, Any], **variants: Any) -> Settings:
    """The fields of all ERNIE 4.5 models; `variants` as of `read_llama`."""
    config = {**config, **{name: value for name, value in _DEFAULTS.items() if config.get(name) is None}}
    has_bias = read_bool(config, "use_bias", False)
    return read_llama(
        config,
        has_rotated_pairs=True,
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
        has_mlp_bias=has_bias,
        **variants,
    )
