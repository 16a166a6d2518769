"""Later decoders of the Llama family without experts: names, and fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.layer_names import ATTENTION, GATED, HEAD_NORMS, LLAMA, Architecture
from llmstack_gguf.variants import Values

_PLAIN = replace(LLAMA, interleaves_heads=False)
_PARALLEL: Mapping[str, str] = {part: name for part, name in ATTENTION.items() if part != "ffn_norm"}
# Norms behind what a layer adds, and none before.
_BEHIND: Mapping[str, str] = {
    **{part: name for part, name in ATTENTION.items() if not part.endswith("_norm")},
    **HEAD_NORMS,
    **GATED,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
HUNYUAN_NORMS: Mapping[str, str] = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
DENSE: Mapping[str, Architecture] = {
    "ernie4_5": replace(_PLAIN, class_name="Ernie4_5ForCausalLM", model_type="ernie4_5"),
    "hunyuan-dense": replace(
        _PLAIN,
        class_name="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        layer={**LLAMA.layer, **HUNYUAN_NORMS},
    ),
    "granite": replace(LLAMA, class_name="GraniteForCausalLM", model_type="granite"),
    "glm4": replace(
        _PLAIN,
        class_name="Glm4ForCausalLM",
        model_type="glm4",
        layer={
            **ATTENTION,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "command-r": replace(
        _PLAIN, class_name="CohereForCausalLM", model_type="cohere", layer={**_PARALLEL, **HEAD_NORMS, **GATED}
    ),
    "cohere2": replace(_PLAIN, class_name="Cohere2ForCausalLM", model_type="cohere2", layer={**_PARALLEL, **GATED}),
    "seed_oss": replace(
        _PLAIN,
        class_name="SeedOssForCausalLM",
        model_type="seed_oss",
        layer={**LLAMA.layer, "post_attention_norm": "post_attention_layernorm"},
    ),
    "mistral3": replace(LLAMA, class_name="Ministral3ForCausalLM", model_type="ministral3"),
    "smollm3": replace(LLAMA, class_name="SmolLM3ForCausalLM", model_type="smollm3"),
    "olmo2": replace(_PLAIN, class_name="Olmo2ForCausalLM", model_type="olmo2", layer=_BEHIND),
    "exaone4": replace(_PLAIN, class_name="Exaone4ForCausalLM", model_type="exaone4", layer=_BEHIND),
}
OLMO_3 = replace(DENSE["olmo2"], class_name="Olmo3ForCausalLM", model_type="olmo3")
"""Files of `olmo2` with windows."""
_WINDOW_PERIOD = 4  # of the layers of Cohere 2, OLMo 3 and EXAONE 4 every fourth has no window
_Common = Mapping[str, Any]


def has_windows(header: Header) -> bool:
    """Whether a file of `olmo2` is one of OLMo 3."""
    return bool(header.metadata.get("olmo2.attention.sliding_window"))


def _rms(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    return {"rms_norm_eps": values.number("attention.layer_norm_rms_epsilon")}


def _with_biases(name: str) -> Callable[[Header, Values, _Common], dict[str, Any]]:
    """Fields of a family whose queries, keys and values may have biases, which the field of this name says."""

    def fields(header: Header, values: Values, common: _Common) -> dict[str, Any]:
        return _rms(header, values, common) | {name: "blk.0.attn_q.bias" in header.tensors}

    return fields


def _granite(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    return _with_biases("attention_bias")(header, values, common) | {
        "attention_multiplier": values.number("attention.scale"),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale", 1.0),
    }


def _command_r(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    return {
        "layer_norm_eps": values.number("attention.layer_norm_epsilon"),
        "logit_scale": values.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _cohere_2(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    head_dim = common["head_dim"]
    if common["num_attention_heads"] * head_dim != common["hidden_size"]:
        raise GGUFError("heads that are no parts of the hidden states are not supported for this architecture.")
    return {
        "layer_norm_eps": values.number("attention.layer_norm_epsilon"),
        "logit_scale": values.number("logit_scale"),
        **_windows(values, common),
    }


def _seed_oss(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    own = _with_biases("attention_bias")(header, values, common)
    return own | {"attention_out_bias": "blk.0.attn_output.bias" in header.tensors}


def _smollm_3(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    """Every fourth layer knows no positions, which files do not say."""
    own = _with_biases("attention_bias")(header, values, common)
    return own | {"no_rope_layers": None, "no_rope_layer_interval": 4}


def _mistral_3(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    """Ministral 3: queries grow with their position. YaRN's factor is as written for all of its models."""
    scaling = common.get("rope_scaling") or {}
    if scaling.get("rope_type") != "yarn" or not values.has("attention.temperature_scale"):
        raise GGUFError("only files with YaRN and with a scale of attention are supported for this architecture.")
    scales = values.number("rope.scaling.yarn_log_multiplier", 0.0)
    rope = {
        **scaling,
        "rope_theta": common["rope_theta"],
        "mscale": scales,
        "mscale_all_dim": scales,
        "llama_4_scaling_beta": values.number("attention.temperature_scale"),
    }
    return _rms(header, values, common) | {"rope_parameters": rope}


def _olmo_2(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, whose layers with a window have RoPE without scaling."""
    own = _with_biases("attention_bias")(header, values, common)
    if not has_windows(header):
        return own
    plain = {"rope_type": "default", "rope_theta": common["rope_theta"]}
    ropes = {"sliding_attention": plain, "full_attention": plain | (common.get("rope_scaling") or {})}
    return own | _windows(values, common) | {"rope_parameters": ropes}


def _exaone_4(header: Header, values: Values, common: _Common) -> dict[str, Any]:
    own = _rms(header, values, common)
    if not values.integer("attention.sliding_window", 0):
        kinds = ["full_attention"] * common["num_hidden_layers"]
        return own | {"sliding_window": None, "sliding_window_pattern": None, "layer_types": kinds}
    return own | _windows(values, common)


def _windows(values: Values, common: _Common) -> dict[str, Any]:
    """The window of three of four layers, unless the file says which have one."""
    count = common["num_hidden_layers"]
    have_windows = [(number + 1) % _WINDOW_PERIOD != 0 for number in range(count)]
    if values.has("attention.sliding_window_pattern"):
        have_windows = [bool(one) for one in values.integers("attention.sliding_window_pattern", count)]
    return {
        "sliding_window": values.integer("attention.sliding_window"),
        "layer_types": [("sliding" if one else "full") + "_attention" for one in have_windows],
    }


DENSE_FIELDS: Mapping[str, Callable[[Header, Values, _Common], dict[str, Any]]] = {
    "ernie4_5": _with_biases("use_bias"),
    "hunyuan-dense": _with_biases("attention_bias"),
    "granite": _granite,
    "glm4": _with_biases("attention_bias"),
    "command-r": _command_r,
    "cohere2": _cohere_2,
    "seed_oss": _seed_oss,
    "mistral3": _mistral_3,
    "smollm3": _smollm_3,
    "olmo2": _olmo_2,
    "exaone4": _exaone_4,
}
