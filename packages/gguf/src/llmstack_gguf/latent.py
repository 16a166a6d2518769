"""Architectures with latent attention: those of DeepSeek V3 and of Kimi Linear."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.layer_names import ENDS, EXPERTS, FORMS, GATED, SHARED_EXPERTS, Architecture
from llmstack_gguf.variants import Values, rope_scaling_of

_SOFTMAX, _SIGMOID = 1, 2  # numbers of functions of routers
_LATENT: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": "self_attn.kv_b_proj.weight",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **GATED,
    **EXPERTS,
    **SHARED_EXPERTS,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_FORMS: Mapping[str, str] = {**FORMS, "attn_k_b.weight": "products"}
_DEEPSEEK_V3 = Architecture(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    _LATENT,
    ENDS,
    partners={"attn_k_b.weight": "attn_v_b.weight"},
    forms=_FORMS,
)
DEEPSEEK_V2 = replace(_DEEPSEEK_V3, class_name="DeepseekV2ForCausalLM", model_type="deepseek_v2")
"""Files of `deepseek2` whose router takes a softmax."""
_KIMI_LINEAR = replace(
    _DEEPSEEK_V3,
    class_name="KimiLinearForCausalLM",
    model_type="kimi_linear",
    layer={
        **_LATENT,
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "ssm_conv1d_q": "self_attn.q_conv1d",
        "ssm_conv1d_k": "self_attn.k_conv1d",
        "ssm_conv1d_v": "self_attn.v_conv1d",
        "ssm_f_a": "self_attn.f_a_proj",
        "ssm_f_b": "self_attn.f_b_proj",
        "ssm_g_a": "self_attn.g_a_proj",
        "ssm_g_b": "self_attn.g_b_proj",
        "ssm_beta": "self_attn.b_proj",
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "ssm_norm": "self_attn.o_norm",
    },
    forms={
        **_FORMS,
        "ssm_a": "wide logs",
        **{f"ssm_conv1d_{part}.weight": "taps" for part in "qkv"},
    },
)
LATENT: Mapping[str, Architecture] = {"deepseek2": _DEEPSEEK_V3, "kimi-linear": _KIMI_LINEAR}


def is_softmax(header: Header) -> bool:
    """Whether the router of a file of `deepseek2` takes a softmax; old files do not say it."""
    found = header.metadata.get("deepseek2.expert_gating_func", 0)
    if found not in (0, _SOFTMAX, _SIGMOID):
        raise GGUFError(f"the function {str(found)[:64]} of its router is not supported.")
    has_corrections = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    return found == _SOFTMAX or (not found and not has_corrections and bool(_num_experts(header)))


def _num_experts(header: Header) -> object:
    return header.metadata.get(f"{header.architecture}.expert_count")


def deepseek_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of DeepSeek V2 and V3."""
    if values.has("attention.temperature_scale"):
        raise GGUFError("queries that are scaled by their positions are not supported for this architecture.")
    num_groups = max(values.integer("expert_group_count", 1), 1)
    is_limited = is_softmax(header) and num_groups > 1
    return _latent_fields(values) | {
        "rope_theta": values.number("rope.freq_base", 10_000.0),
        "rope_scaling": _yarn(values),
        "n_group": num_groups,
        "topk_group": max(values.integer("expert_group_used_count", 1), 1),
        "topk_method": "group_limited_greedy" if is_limited else "greedy" if is_softmax(header) else "noaux_tc",
        "scoring_func": "softmax" if is_softmax(header) else "sigmoid",
    }


def kimi_linear_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Kimi Linear: layers without heads of keys and values have delta nets."""
    num_layers = values.num_layers()
    have_latents = [count > 0 for count in values.integers("attention.head_count_kv", num_layers)]
    numbers = range(1, num_layers + 1)
    if values.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise GGUFError("a router without sigmoids is not supported for this architecture.")
    fields = _latent_fields(values)
    return fields | {
        "model_max_length": fields["max_position_embeddings"],
        "num_experts": values.integer("expert_count"),
        "num_experts_per_token": values.integer("expert_used_count"),
        "num_shared_experts": values.integer("expert_shared_count", 0),
        "num_expert_group": max(values.integer("expert_group_count", 1), 1),
        "topk_group": max(values.integer("expert_group_used_count", 1), 1),
        "moe_renormalize": values.flag("expert_weights_norm", default=True),
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [number for number in numbers if have_latents[number - 1]],
            "kda_layers": [number for number in numbers if not have_latents[number - 1]],
            "num_heads": values.integer("attention.head_count"),
            "head_dim": values.integer("kda.head_dim"),
            "short_conv_kernel_size": values.integer("ssm.conv_kernel"),
        },
    }


def _latent_fields(values: Values) -> dict[str, Any]:
    """Sizes of latents and of experts. In files whose products are apart, keys and values are those of the latents."""
    rank, rotary_dim = values.integer("attention.kv_lora_rank"), values.integer("rope.dimension_count")
    key_dim = values.integer("attention.key_length_mla", values.integer("attention.key_length", 0))
    if key_dim <= rotary_dim:
        raise GGUFError(f"heads of {key_dim} numbers have none beside the {rotary_dim} with RoPE.")
    num_experts = values.integer("expert_count", 0)
    fields: dict[str, Any] = {
        "hidden_size": values.integer("embedding_length"),
        "num_hidden_layers": values.num_layers(),
        "num_attention_heads": values.integer("attention.head_count"),
        "max_position_embeddings": values.integer("context_length"),
        "intermediate_size": values.integer("feed_forward_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "kv_lora_rank": rank,
        "q_lora_rank": values.integer("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key_dim - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": values.integer("attention.value_length_mla", values.integer("attention.value_length", 0)),
        "n_routed_experts": num_experts or None,
    }
    if not num_experts:
        return fields
    return fields | {
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "n_shared_experts": values.integer("expert_shared_count", 0),
        "first_k_dense_replace": values.integer("leading_dense_block_count", 0),
        "norm_topk_prob": values.flag("expert_weights_norm", default=False),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0) or 1.0,
    }


def _yarn(values: Values) -> dict[str, Any] | None:
    """Files have a tenth of what repositories call `mscale` of all numbers; both scales are equal in all models."""
    scaling, tenth = rope_scaling_of(values), values.number("rope.scaling.yarn_log_multiplier", 0.0)
    return scaling if scaling is None or not tenth else scaling | {"mscale": 10 * tenth, "mscale_all_dim": 10 * tenth}


LATENT_FIELDS: Mapping[str, Callable[[Header, Values], dict[str, Any]]] = {
    "deepseek2": deepseek_fields,
    "kimi-linear": kimi_linear_fields,
}
