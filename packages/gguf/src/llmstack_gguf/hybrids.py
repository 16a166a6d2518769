"""Architectures whose layers keep states: names of tensors, and fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.variants import Values, share_of


def _state_space(name: str) -> dict[str, str]:
    parts = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm"}
    single = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {part: f"{name}.{own}" for part, own in (parts | single).items()}


_SHARED = {f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
LFM2: Mapping[str, str] = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
GRANITE: Mapping[str, str] = {
    **_state_space("mamba"),
    **_SHARED,
    "ffn_gate_inp": "block_sparse_moe.gate",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
FALCON_H1: Mapping[str, str] = {
    **_state_space("mamba"),
    "ffn_norm": "pre_ff_layernorm.weight",  # llama.cpp's converter leaves `.weight` off
    "ffn_norm.weight": "pre_ff_layernorm.weight",
}
NEMOTRON: Mapping[str, str] = {
    **_state_space("mixer"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}


QWEN_35: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
QWEN_3_NEXT: Mapping[str, str] = {
    **QWEN_35,
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of old files
}


def _common(values: Values) -> dict[str, Any]:
    return {
        "hidden_size": values.integer("embedding_length"),
        "num_hidden_layers": values.num_layers(),
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "layer_norm_epsilon": values.number("attention.layer_norm_rms_epsilon"),
    }


def _with_attention(values: Values) -> dict[str, Any]:
    """Layers without attention have 0 heads of keys and values."""
    num_layers = values.num_layers()
    return _common(values) | {
        "num_attention_heads": max(values.integers("attention.head_count", num_layers), default=0),
        "num_key_value_heads": max(values.integers("attention.head_count_kv", num_layers), default=0),
    }


def _with_state_space(values: Values) -> dict[str, Any]:
    inner_size, num_heads = values.integer("ssm.inner_size"), values.integer("ssm.time_step_rank")
    if not num_heads or inner_size % num_heads:
        raise GGUFError(f"{num_heads} heads cannot share {inner_size} inner features of a state space.")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner_size // num_heads,
        "mamba_n_groups": values.integer("ssm.group_count"),
        "mamba_d_state": values.integer("ssm.state_size"),
        "mamba_d_conv": values.integer("ssm.conv_kernel"),
    }


def _num_rows(header: Header, part: str, dim: int = 0, default: int = 0) -> int:
    """Size of a dimension of the first layer's tensor that has such a name."""
    shapes = (info.shape for name, info in header.tensors.items() if name.endswith(f".{part}.weight"))
    return next((shape[dim] for shape in shapes if len(shape) > dim), default)


def _is_in(header: Header, number: int, part: str) -> bool:
    return f"blk.{number}.{part}.weight" in header.tensors


def lfm2_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of LFM2, dense or with experts."""
    fields = _with_attention(values)
    num_layers = fields["num_hidden_layers"]
    kinds = ["conv" if _is_in(header, number, "shortconv.conv") else "full_attention" for number in range(num_layers)]
    fields |= {
        "norm_eps": fields["rms_norm_eps"],
        "layer_types": kinds,
        "conv_L_cache": values.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in header.tensors),
        "intermediate_size": max(values.integers("feed_forward_length", num_layers), default=0),
        "block_auto_adjust_ff_dim": False,
        "rope_theta": values.number("rope.freq_base", 1e6),
        "tie_embedding": False,
    }
    if header.architecture == "lfm2moe":
        fields |= {
            "num_experts": values.integer("expert_count"),
            "num_experts_per_tok": values.integer("expert_used_count"),
            "moe_intermediate_size": values.integer("expert_feed_forward_length"),
            "num_dense_layers": values.integer("leading_dense_block_count", 0),
            "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in header.tensors),
            "norm_topk_prob": True,
            "routed_scaling_factor": values.number("expert_weights_scale", 1.0) or 1.0,
        }
    return fields


def granite_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Granite 4 H, whose attention knows no positions."""
    if values.flag("rope.scaling.finetuned", default=False):
        raise GGUFError("rotation of heads is not supported for this architecture.")
    fields = _with_attention(values) | _with_state_space(values)
    num_layers, inner_size = fields["num_hidden_layers"], values.integer("ssm.inner_size")
    return fields | {
        "layer_types": ["mamba" if _is_in(header, number, "ssm_in") else "attention" for number in range(num_layers)],
        "mamba_expand": inner_size // max(fields["hidden_size"], 1),
        "intermediate_size": _num_rows(header, "ffn_up_exps", 1, 1),
        "shared_intermediate_size": _num_rows(header, "ffn_up_shexp") or _num_rows(header, "ffn_up"),
        "num_local_experts": values.integer("expert_count", 0),
        "num_experts_per_tok": max(values.integer("expert_used_count", 0), 1),
        "attention_multiplier": values.number("attention.scale"),
        "embedding_multiplier": values.number("embedding_scale", 1.0),
        "residual_multiplier": values.number("residual_scale", 1.0),
        "logits_scaling": values.number("logit_scale", 1.0),
        "position_embedding_type": None,
    }


def falcon_h1_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Falcon-H1, whose factors are part of the weights in files."""
    has_norm = any(name.endswith(".ssm_norm.weight") for name in header.tensors)
    return {
        **_with_attention(values),
        **_with_state_space(values),
        "head_dim": values.integer("attention.key_length"),
        "intermediate_size": values.integer("feed_forward_length"),
        "mamba_d_ssm": values.integer("ssm.inner_size"),
        "mamba_rms_norm": has_norm,
        "mamba_norm_before_gate": False,
        "rope_theta": values.number("rope.freq_base", 10_000.0),
    }


def nemotron_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Nemotron-H, with experts or without; kinds of blocks are those of their tensors."""
    fields, space = _with_attention(values), _with_state_space(values)
    kind_to_part = {"mamba": "ssm_in", "attention": "attn_q", "moe": "ffn_up_exps", "mlp": "ffn_up"}
    kinds = []
    for number in range(fields["num_hidden_layers"]):
        found = [kind for kind, part in kind_to_part.items() if _is_in(header, number, part)]
        if len(found) != 1:
            raise GGUFError(f"block {number} is of no known kind.")
        kinds += found
    fields |= {
        "layers_block_type": kinds,
        "head_dim": values.integer("attention.key_length"),
        "intermediate_size": _num_rows(header, "ffn_up", 0, 1),
        "mamba_num_heads": space["mamba_n_heads"],
        "mamba_head_dim": space["mamba_d_head"],
        "n_groups": space["mamba_n_groups"],
        "ssm_state_size": space["mamba_d_state"],
        "conv_kernel": space["mamba_d_conv"],
    }
    if "moe" in kinds:
        fields |= {
            "n_routed_experts": values.integer("expert_count"),
            "num_experts_per_tok": values.integer("expert_used_count"),
            "moe_intermediate_size": _num_rows(header, "ffn_up_exps", 1),
            "moe_shared_expert_intermediate_size": _num_rows(header, "ffn_up_shexp"),
            "moe_latent_size": _num_rows(header, "ffn_latent_down") or None,
            "n_group": max(values.integer("expert_group_count", 1), 1),
            "topk_group": max(values.integer("expert_group_used_count", 1), 1),
            "norm_topk_prob": values.flag("expert_weights_norm", default=True),
            "routed_scaling_factor": values.number("expert_weights_scale", 1.0) or 1.0,
        }
    return fields


def qwen_35_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Qwen3-Next, and of Qwen 3.5 and 3.6, dense or with experts."""
    fields, head_dim = _with_attention(values), values.integer("attention.key_length")
    num_layers = fields["num_hidden_layers"]
    num_heads, inner_size = values.integer("ssm.time_step_rank"), values.integer("ssm.inner_size")
    if not num_heads or inner_size % num_heads:
        raise GGUFError(f"{num_heads} heads cannot share {inner_size} features of values.")
    kinds = ["linear" if _is_in(header, number, "ssm_out") else "full" for number in range(num_layers)]
    fields |= {
        "head_dim": head_dim,
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "linear_num_key_heads": values.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": values.integer("ssm.state_size"),
        "linear_value_head_dim": inner_size // num_heads,
        "linear_conv_kernel_dim": values.integer("ssm.conv_kernel"),
        "rope_theta": values.number("rope.freq_base", 10_000_000.0),
        "partial_rotary_factor": share_of(values.integer("rope.dimension_count"), head_dim),
    }
    if header.architecture == "qwen35":
        return fields | {"intermediate_size": values.integer("feed_forward_length")}
    return fields | {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": _num_rows(header, "ffn_up_exps", 1),
        "shared_expert_intermediate_size": _num_rows(header, "ffn_up_shexp"),
    }


def qwen_3_next_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Qwen3-Next; old files have all inputs of a delta net in one tensor, as repositories do."""
    is_joined = any(name.endswith(".ssm_in.weight") for name in header.tensors)
    return qwen_35_fields(header, values) | {"norm_topk_prob": True, "has_joined_delta_inputs": is_joined}


def mamba2_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Mamba-2 alone."""
    fields, space = _common(values), _with_state_space(values)
    return fields | {
        "num_heads": space["mamba_n_heads"],
        "head_dim": space["mamba_d_head"],
        "n_groups": space["mamba_n_groups"],
        "state_size": space["mamba_d_state"],
        "conv_kernel": space["mamba_d_conv"],
        "expand": values.integer("ssm.inner_size") // max(fields["hidden_size"], 1),
    }


HYBRID_FIELDS: Mapping[str, Callable[[Header, Values], dict[str, Any]]] = {
    "falcon-h1": falcon_h1_fields,
    "granitehybrid": granite_fields,
    "lfm2": lfm2_fields,
    "lfm2moe": lfm2_fields,
    "mamba2": mamba2_fields,
    "nemotron_h": nemotron_fields,
    "nemotron_h_moe": nemotron_fields,
    "qwen3next": qwen_3_next_fields,
    "qwen35": qwen_35_fields,
    "qwen35moe": qwen_35_fields,
}
"""Architectures with states to what reads their fields."""
