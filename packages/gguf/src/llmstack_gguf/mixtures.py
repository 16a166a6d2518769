"""Decoders of the Llama family with experts: names of tensors, and fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmstack_gguf.dense import HUNYUAN_NORMS
from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.layer_names import ATTENTION, EXPERTS, FORMS, GATED, HEAD_NORMS, LLAMA, SHARED_EXPERTS, Architecture
from llmstack_gguf.variants import Values

_SIGMOID = 2  # number of the function of a router
_GLM_4 = replace(
    LLAMA,
    class_name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    layer={
        **ATTENTION,
        **HEAD_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        **GATED,
        **EXPERTS,
        **SHARED_EXPERTS,
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    interleaves_heads=False,
)
_PLAIN = replace(LLAMA, interleaves_heads=False)
MIXTURES: Mapping[str, Architecture] = {
    "glm4moe": _GLM_4,
    "minimax-m2": replace(
        _PLAIN,
        class_name="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        layer={
            **ATTENTION,
            **HEAD_NORMS,
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        },
    ),
    "ernie4_5-moe": replace(
        _PLAIN,
        class_name="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        layer={
            **ATTENTION,
            **GATED,
            **EXPERTS,
            **SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        forms={**FORMS, "exp_probs_b.bias": "flat"},
    ),
    "hunyuan-moe": replace(
        _PLAIN,
        class_name="HunYuanMoEV1ForCausalLM",
        model_type="hunyuan_v1_moe",
        layer={
            **ATTENTION,
            **HUNYUAN_NORMS,
            **EXPERTS,
            **{part: name.replace("shared_experts", "shared_mlp") for part, name in SHARED_EXPERTS.items()},
            "ffn_gate_inp": "mlp.gate.wg",
        },
    ),
    "hy_v3": replace(
        _PLAIN,
        class_name="HYV3ForCausalLM",
        model_type="hy_v3",
        layer={
            **ATTENTION,
            **HEAD_NORMS,
            **GATED,
            **EXPERTS,
            **{part: name.replace("shared_experts", "shared_mlp") for part, name in SHARED_EXPERTS.items()},
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
    ),
    "olmoe": replace(
        _PLAIN, class_name="OlmoeForCausalLM", model_type="olmoe", layer={**ATTENTION, **HEAD_NORMS, **EXPERTS}
    ),
    "qwen2moe": replace(
        _PLAIN,
        class_name="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        layer={
            **ATTENTION,
            **EXPERTS,
            **{part: name.replace("shared_experts", "shared_expert") for part, name in SHARED_EXPERTS.items()},
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
    ),
}


def expert_fields(values: Values) -> dict[str, Any]:
    """Fields that configurations of several families have, as DeepSeek V3 calls them."""
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "n_shared_experts": values.integer("expert_shared_count", 0),
        "first_k_dense_replace": values.integer("leading_dense_block_count", 0),
        "n_group": max(values.integer("expert_group_count", 1), 1),
        "topk_group": max(values.integer("expert_group_used_count", 1), 1),
        "norm_topk_prob": values.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0) or 1.0,
    }


def _glm_4(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    require_sigmoid(values)
    return expert_fields(values) | {
        "n_routed_experts": values.integer("expert_count"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def require_sigmoid(values: Values) -> None:
    """Refuses a router that takes a softmax; a file that does not say it is as its architecture."""
    if values.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise GGUFError("a router without sigmoids is not supported for this architecture.")


def _minimax_m2(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    require_sigmoid(values)
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "num_local_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
    }


def _ernie(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in header.tensors,
        "moe_num_experts": values.integer("expert_count"),
        "moe_k": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": values.integer("expert_shared_count", 0),
        "moe_layer_start_index": values.integer("leading_dense_block_count", 0),
        "moe_layer_end_index": common["num_hidden_layers"] - 1,
        "moe_layer_interval": values.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    inner_size = values.integer("expert_feed_forward_length", common["intermediate_size"])
    if inner_size != common["intermediate_size"] or values.integer("expert_shared_count", 1) != 1:
        raise GGUFError("shared experts of another width are not supported for this architecture.")
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "num_experts": values.integer("expert_count"),
        "moe_topk": values.integer("expert_used_count"),
    }


def _hy_v3(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    require_sigmoid(values)
    if not values.flag("expert_weights_norm", default=True):
        raise GGUFError("experts whose weights do not sum to 1 are not supported for this architecture.")
    inner_size = values.integer("expert_feed_forward_length")
    shared_size = values.integer("expert_shared_feed_forward_length", inner_size)
    if not inner_size or shared_size % inner_size:
        raise GGUFError(f"shared experts of {shared_size} numbers are no multiple of {inner_size}.")
    numbers = range(common["num_hidden_layers"])
    are_mixed = [f"blk.{number}.ffn_gate_inp.weight" in header.tensors for number in numbers]
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": inner_size,
        "num_shared_experts": shared_size // inner_size,
        "router_scaling_factor": values.number("expert_weights_scale", 1.0) or 1.0,
        "mlp_layer_types": ["sparse" if is_mixed else "dense" for is_mixed in are_mixed],
    }


def _olmoe(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "norm_topk_prob": values.flag("expert_weights_norm", default=False),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


def _qwen_2(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    shared = header.tensors.get("blk.0.ffn_up_shexp.weight")
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": shared.shape[0] if shared else 1,
        "norm_topk_prob": values.flag("expert_weights_norm", default=False),
        "qkv_bias": "blk.0.attn_q.bias" in header.tensors,
    }


MIXTURE_FIELDS: Mapping[str, Callable[[Header, Values, Mapping[str, Any]], dict[str, Any]]] = {
    "glm4moe": _glm_4,
    "minimax-m2": _minimax_m2,
    "ernie4_5-moe": _ernie,
    "hunyuan-moe": _hunyuan,
    "hy_v3": _hy_v3,
    "olmoe": _olmoe,
    "qwen2moe": _qwen_2,
}
