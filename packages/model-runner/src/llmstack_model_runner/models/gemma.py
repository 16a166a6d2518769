"""Gemma 1 to 3: scaled embeddings, offset norms, GELU-gated feed-forward.

Gemma 2 adds norms after attention and feed-forward, soft caps, and sliding windows on every other layer. Gemma 3 has no
soft caps. It adds norms on queries and keys, and sliding windows with a RoPE of their own on five layers of six.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_model_runner.layers.rotary import RopeParameters, parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_model_runner.models.llama import Llama, Settings, read_llama

_TANH = "gelu_pytorch_tanh"
# Defaults of fields that a configuration omits, as those of Gemma 3 with vision omit most.
_GEMMA1: Mapping[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA2: Mapping[str, Any] = {
    **_GEMMA1,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3: Mapping[str, Any] = {
    **_GEMMA2,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window_pattern": 6,
}


class Gemma(Llama):
    """`GemmaForCausalLM`: Gemma 1 and CodeGemma."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        """Reads and checks a configuration; `gelu` in the first checkpoints means its tanh approximation."""
        name = config.get("hidden_act") or "gelu"
        return _read({**_GEMMA1, **config}, None, activation=_TANH if name == "gelu" else str(name))


class Gemma2(Llama):
    """`Gemma2ForCausalLM`: soft caps, windows on every other layer."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        complete = _with_layer_types({**_GEMMA2, **config}, sliding_window_pattern=2)
        soft_cap = read_optional_float(complete, "attn_logit_softcapping")
        return _read_with_windows(complete, soft_cap=soft_cap)


class Gemma3(Llama):
    """`Gemma3ForCausalLM`: text only, windows on five layers of six."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        refuse(config, "attn_logit_softcapping")
        pattern = read_int(config, "sliding_window_pattern", 6)
        complete = _with_layer_types({**_GEMMA3, **config}, sliding_window_pattern=pattern)
        full_rope, sliding_rope = _ropes(complete)
        # Without the RoPE parameters: there are two sets, which `read_llama` does not expect.
        settings = _read_with_windows({**complete, "rope_parameters": None, "rope_scaling": None}, has_qk_norm=True)
        layers = [
            replace(layer, rope=full_rope if layer.sliding_window is None else sliding_rope)
            for layer in settings.layers
        ]
        return replace(settings, layers=layers)


def _read(config: Mapping[str, Any], sliding_window: int | None, **variants: Any) -> Settings:
    refuse(config, "use_bidirectional_attention", False)
    has_bias = read_bool(config, "attention_bias", False)
    settings = read_llama(
        config,
        sliding_window,
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
        is_norm_offset=True,
        **variants,
    )
    return replace(
        settings,
        embedding_scale=settings.hidden_size**0.5,
        logit_soft_cap=read_optional_float(config, "final_logit_softcapping"),
    )


def _read_with_windows(config: Mapping[str, Any], **variants: Any) -> Settings:
    """Settings that Gemma 2 and 3 share."""
    return _read(
        config,
        None if config.get("sliding_window") is None else read_int(config, "sliding_window"),
        activation=str(config.get("hidden_activation") or _TANH),
        scale=read_float(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        has_post_norms=True,
        **variants,
    )


def _with_layer_types(config: Mapping[str, Any], sliding_window_pattern: int) -> dict[str, Any]:
    """The configuration with a type for each layer; by default every `sliding_window_pattern`-th has no window."""
    default = [
        "sliding_attention" if (index + 1) % sliding_window_pattern else "full_attention"
        for index in range(read_int(config, "num_hidden_layers"))
    ]
    return {**config, "layer_types": config.get("layer_types") or default}


def read_optional_float(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else read_float(config, name, 0.0)


def _ropes(config: Mapping[str, Any]) -> tuple[RopeParameters, RopeParameters]:
    """RoPE of layers without and with a window; older configurations scale only the former."""
    head_dim, max_positions = read_int(config, "head_dim"), read_int(config, "max_position_embeddings")
    found = config.get("rope_parameters")
    if not isinstance(found, Mapping):
        found = {}
    full = {"rope_theta": config.get("rope_theta", 1e6), **(config.get("rope_scaling") or {})}
    sliding = {"rope_theta": config.get("rope_local_base_freq", 1e4)}
    full_rope, sliding_rope = (
        parse_rope({"rope_parameters": {**default, **(found.get(name) or {})}}, head_dim, max_positions)
        for name, default in (("full_attention", full), ("sliding_attention", sliding))
    )
    return full_rope, sliding_rope
