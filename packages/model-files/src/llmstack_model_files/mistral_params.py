"""Configurations in Mistral's own form, as `config.json` says the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from llmstack_model_files.folder import ModelFilesError

_FIELDS: Mapping[str, str] = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_LATENT_FIELDS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERT_FIELDS: Mapping[str, str] = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "first_k_dense_replace": "first_k_dense_replace",
    "expert_hidden_dim": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
_YARN_FIELDS: Mapping[str, str] = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_VISION_FIELDS = ("hidden_size", "num_channels", "image_size", "patch_size", "rope_theta", "intermediate_size",
                  "num_hidden_layers", "num_attention_heads")  # fmt: skip
# Fields that say nothing of what is computed, and values that are always so.
_INERT: Mapping[str, tuple[object, ...]] = {
    "activation": ("silu", None),
    "causal": (True, None),
    "model_type": ("transformer", None),
    "use_biases": (False, None),
}
_SIZES = frozenset({*_FIELDS, "max_batch_size", "max_seq_len", *_LATENT_FIELDS} - {"norm_eps"})
_MAX_SIZE = 1 << 31
_MAX_LAYERS = 1 << 12
_OBJECTS = ("llama_4_scaling", "moe", "multimodal", "quantization", "vision_encoder", "yarn")
# What experts without latent attention may say: the class has no field for anything else.
_PLAIN_EXPERTS: Mapping[str, object] = {
    "first_k_dense_replace": 0, "routed_scale": 1.0, "num_shared_experts": 0, "num_expert_groups": 1,
    "num_expert_groups_per_tok": 1,
}  # fmt: skip
_USUAL_EXPERTS: Mapping[str, object] = {
    "route_every_n": 1, "renorm_strategy": "WEIGHTS", "use_load_balancing_bias": False
}  # fmt: skip
_UNREAD = frozenset({"max_batch_size", "max_position_embeddings", "max_seq_len", "ragged_attention"})
_READ = frozenset({"dtype", "llama_4_scaling", "moe", "multimodal", "quantization", "rope_theta", "sliding_window",
                   "tied_embeddings", "vision_encoder", "yarn"})  # fmt: skip
_DEFAULT_POSITIONS = 128_000
_DEFAULT_THETA = 10_000.0
_BOS, _EOS = 1, 2  # in all of Mistral's tokenizers


def config_of_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model as the classes of transformers write it.

    Raises:
        ModelFilesError: A field is missing, or says something that is not supported.
    """
    _check_fields(params)
    text = _text_config(params)
    vision = params.get("vision_encoder") or (params.get("multimodal") or {}).get("vision_encoder_args")
    quantization = _quantization(params.get("quantization"))
    if not vision:
        return {**text, **quantization}
    return {**_with_pictures(text, vision), **quantization}


def _check_fields(params: Mapping[str, Any]) -> None:
    known = {*_FIELDS, *_LATENT_FIELDS, *_INERT, *_UNREAD, *_READ}
    for name, value in params.items():
        if name not in known:
            raise ModelFilesError(f"params.json: the field {name[:64]} is not known, and it may change answers.")
        if name in _INERT and value not in _INERT[name]:
            raise ModelFilesError(f"params.json: {name} {str(value)[:64]} is not supported.")
    missing = [name for name in _FIELDS if params.get(name) is None and name not in ("head_dim", "n_kv_heads")]
    if missing:
        raise ModelFilesError(f"params.json lacks {', '.join(missing)}.")
    _check_kinds(params)
    if (params.get("multimodal") or {}).get("whisper_model_args"):
        raise ModelFilesError(
            "params.json: a model of sound is not read in Mistral's own form; leave out --config-format mistral and "
            "--load-format mistral."
        )


def _check_kinds(params: Mapping[str, Any]) -> None:
    """Refuses values of another kind than their fields have, before anything is computed from them."""
    for name, value in params.items():
        if value is None:
            continue
        if name in _SIZES:
            limit = _MAX_LAYERS if name == "n_layers" else _MAX_SIZE
            _require(type(value) is int and 0 < value <= limit, name, f"an integer from 1 to {limit}")
        elif name in _OBJECTS:
            _require(isinstance(value, Mapping), name, "an object")
        elif name in ("norm_eps", "rope_theta"):
            _require(_is_number(value) and value > 0, name, "a number over 0")
        elif name == "tied_embeddings":
            _require(isinstance(value, bool), name, "true or false")
        elif name == "dtype":
            _require(isinstance(value, str), name, "a string")
    vision = (params.get("multimodal") or {}).get("vision_encoder_args")
    _require(vision is None or isinstance(vision, Mapping), "multimodal.vision_encoder_args", "an object")


def _require(is_met: bool, name: str, kind: str) -> None:
    if not is_met:
        raise ModelFilesError(f"params.json: {name} must be {kind}.")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # a number


def _text_config(params: Mapping[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {own: params[name] for name, own in _FIELDS.items() if params.get(name) is not None}
    is_latent = bool(params.get("kv_lora_rank"))
    if is_latent:
        config.pop("head_dim", None)  # the parts of a head are said apart
        config["num_key_value_heads"] = config["num_attention_heads"]
    else:
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config |= {
        "hidden_act": "silu",
        "max_position_embeddings": _num_positions(params),
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
    }
    if params.get("dtype") is not None:
        config["dtype"] = params["dtype"]
    return {**config, **_window(params, config["num_hidden_layers"]), **_rope(params, is_latent), **_class_of(params)}


def _num_positions(params: Mapping[str, Any]) -> int:
    given = [params.get("max_position_embeddings"), params.get("max_seq_len")]
    return next((number for number in given if type(number) is int and number > 0), _DEFAULT_POSITIONS)


def _class_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The class, with the fields that it alone has."""
    moe = params.get("moe") or {}
    _check_window_of_class(params)
    if params.get("kv_lora_rank"):
        return {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", **_latent(params, moe)}
    if latent := [name for name in _LATENT_FIELDS if params.get(name)]:
        raise ModelFilesError(f"params.json: {latent[0]} without kv_lora_rank is not supported.")
    if moe.get("num_shared_experts"):
        raise ModelFilesError("params.json: shared experts without latent attention are not supported.")
    if moe:
        _check_experts(moe, {**_PLAIN_EXPERTS, **_USUAL_EXPERTS}, {"num_experts", "num_experts_per_tok"})
        experts = {"num_local_experts": moe.get("num_experts"), "num_experts_per_tok": moe.get("num_experts_per_tok")}
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **experts}
    if params.get("llama_4_scaling"):
        return {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    if isinstance(params.get("sliding_window"), list):
        return {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def _check_window_of_class(params: Mapping[str, Any]) -> None:
    """Refuses windows that the model's class has no fields for, and would not have."""
    window = params.get("sliding_window")
    if window is not None and params.get("kv_lora_rank"):
        raise ModelFilesError("params.json: sliding_window with latent attention is not supported.")
    if isinstance(window, list) and params.get("llama_4_scaling"):
        raise ModelFilesError("params.json: a pattern of windows with llama_4_scaling is not supported.")


def _check_experts(moe: Mapping[str, Any], usual: Mapping[str, object], read: Collection[str]) -> None:
    for name in moe:
        if name not in usual and name not in read:
            raise ModelFilesError(f"params.json: the field moe.{name[:64]} is not known, and it may change answers.")
    for name, value in usual.items():
        if moe.get(name, value) != value:
            raise ModelFilesError(f"params.json: moe.{name} {str(moe[name])[:64]} is not supported; {value} is.")


def _latent(params: Mapping[str, Any], moe: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of latent attention, and of experts behind it; a model without experts has dense layers alone."""
    _check_experts(moe, _USUAL_EXPERTS, _EXPERT_FIELDS.keys())
    found = {name: params.get(name) for name in _LATENT_FIELDS}
    found |= {own: moe[name] for name, own in _EXPERT_FIELDS.items() if name in moe}
    dense = {"n_routed_experts": None, "first_k_dense_replace": params["n_layers"]}
    return {**found, **({} if moe else dense), "norm_topk_prob": True, "rope_interleave": True}


def _window(params: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """One window of all layers, or a pattern of windows that repeats, in which None is the whole context."""
    window = params.get("sliding_window")
    if window is None or _is_window(window):
        return {"sliding_window": window}
    is_pattern = isinstance(window, list) and window and all(size is None or _is_window(size) for size in window)
    sizes = set(window) - {None} if is_pattern else {None, 0}
    if len(sizes) > 1 or num_layers % len(window):
        raise ModelFilesError("params.json: sliding_window is neither a number nor a pattern of one for all layers.")
    types = ["full_attention" if size is None else "sliding_attention" for size in window]
    return {"sliding_window": next(iter(sizes), None), "layer_types": types * (num_layers // len(window))}


def _is_window(value: object) -> bool:
    return type(value) is int and 0 < value <= _MAX_SIZE


def _rope(params: Mapping[str, Any], is_latent: bool) -> dict[str, Any]:
    """RoPE with YaRN, and queries that grow with their position."""
    theta = float(params.get("rope_theta") or _DEFAULT_THETA)
    yarn, growth = params.get("yarn"), params.get("llama_4_scaling")
    if not yarn:
        if growth:
            raise ModelFilesError("params.json: llama_4_scaling without yarn is not supported.")
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    if unknown := sorted(yarn.keys() - {*_YARN_FIELDS, "apply_scale"}):
        raise ModelFilesError(f"params.json: the field yarn.{unknown[0][:64]} is not known, and it may change answers.")
    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": theta}
    for name in _YARN_FIELDS.keys() & yarn.keys():
        _require(_is_number(yarn[name]), f"yarn.{name}", "a number")
    rope |= {own: yarn[name] for name, own in _YARN_FIELDS.items() if name in yarn}
    is_scaled = bool(yarn.get("apply_scale", True))
    if is_latent and is_scaled:  # the scores are scaled, in place of cosines and sines
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    elif not is_scaled:
        rope["attention_factor"] = 1.0
    if growth:
        if unknown := sorted(growth.keys() - {"beta", "original_max_position_embeddings"}):
            raise ModelFilesError(f"params.json: the field llama_4_scaling.{unknown[0][:64]} is not known.")
        _require(_is_number(growth.get("beta")), "llama_4_scaling.beta", "a number")
        if growth.get("original_max_position_embeddings") != yarn.get("original_max_position_embeddings"):
            raise ModelFilesError("params.json: llama_4_scaling and yarn begin at different positions.")
        rope["llama_4_scaling_beta"] = float(growth["beta"])
    return {"rope_parameters": rope}


def _with_pictures(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    """Pixtral's tower before the text model, with or without squares of patches merged."""
    tower = {"model_type": "pixtral", "hidden_act": "silu"}
    tower |= {name: vision[name] for name in _VISION_FIELDS if name in vision}
    merges = vision.get("mm_projector_id") == "patch_merge"
    if not merges and vision.get("mm_projector_id") not in (None, ""):
        raise ModelFilesError(f"params.json: mm_projector_id {str(vision['mm_projector_id'])[:64]} is not supported.")
    if bool(vision.get("add_pre_mm_projector_layer_norm", False)) != merges:
        raise ModelFilesError("params.json: a norm before the projector and merged patches come together alone.")
    whole = {
        "image_token_index": vision.get("image_token_id", 10),
        "multimodal_projector_bias": bool(vision.get("adapter_bias", not merges)),
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": dict(text),
        "vision_config": tower,
    }
    if merges:
        merge = {"spatial_merge_size": vision.get("spatial_merge_size", 2)}
        return {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", **merge, **whole}
    full = {"vision_feature_select_strategy": "full"}
    return {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", **full, **whole}


def _quantization(found: Any) -> dict[str, Any]:
    """FP8 with a scale of each tensor, or compressed-tensors as it is."""
    if not found:
        return {}
    method = str(found.get("quant_method", "")).lower().replace("_", "-")
    if found.get("qformat_weight") == "fp8_e4m3" and found.get("qscheme_act") in ("TENSOR", "NO_SCALES", None):
        scheme = "dynamic" if found.get("qscheme_act") == "NO_SCALES" else "static"
        return {"quantization_config": {"quant_method": "fp8", "activation_scheme": scheme}}
    if method == "compressed-tensors":
        return {"quantization_config": {**found, "quant_method": method}}
    raise ModelFilesError(f"params.json: quantization {str(dict(found))[:128]} is not supported.")
