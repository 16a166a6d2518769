"""Configurations of models with states as the hub has them, with small numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from state_tokens import VOCAB_SIZE

_SIZES: dict[str, Any] = {
    "torch_dtype": "float32", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "moe_layer_freq": 1}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "torch_dtype": "float32", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "expand": 2,
    "num_hidden_layers": 3, "state_size": 16, "conv_kernel": 4, "hidden_act": "silu", "layer_norm_epsilon": 1e-05,
    "residual_in_fp32": True, "time_step_rank": 4, "use_bias": False, "use_conv_bias": True, "initializer_range": 0.1,
    "rescale_prenorm_residual": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A class with a configuration of the hub.

    Attributes:
        has_names_of_adapters: The hub's names of layers are those of adapters, which `check_adapter` needs.
        renamed: Single layers that have another name in the hub, which it leaves out.
        adapter_spread: Of the factors of an adapter: so large that other tokens follow.
        has_other_names: The hub has other names of tensors than transformers, or no head where it is tied.
    """

    architecture: str
    config: dict[str, Any]
    has_other_names: bool = True
    has_experts: bool = False
    is_captured: bool = True
    has_names_of_adapters: bool = True
    renamed: tuple[str, ...] = ()
    adapter_spread: float = 0.05


PUBLISHED: dict[str, Published] = {
    "OlmoHybrid": Published(
        "OlmoHybridForCausalLM",
        _SIZES | {
            "model_type": "olmo_hybrid", "num_hidden_layers": 4, "num_key_value_heads": 4, "attention_bias": False,
            "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-06, "linear_key_head_dim": 12,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "linear_conv_kernel_dim": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_allow_neg_eigval": True,
            "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 24,
        },
    ),
    "KimiLinear": Published(
        "KimiLinearForCausalLM",
        _SIZES | _EXPERTS | _LATENT | {
            "model_type": "kimi_linear", "num_hidden_layers": 5, "head_dim": 12, "q_lora_rank": None,
            "linear_attn_config": {
                "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 1,
            "topk_group": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "mla_use_nope": True,
            "use_grouped_topk": True, "model_max_length": 256, "rope_theta": 10000.0,
            "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.446,
        },
        has_experts=True,
        is_captured=False,
    ),
    "BailingHybrid": Published(
        "BailingHybridForCausalLM",
        _SIZES | _EXPERTS | _LATENT | {
            "model_type": "bailing_hybrid", "num_hidden_layers": 6, "head_dim": 16, "layer_group_size": 3,
            "q_lora_rank": None, "kda_safe_gate": True, "kda_lower_bound": -5.0, "short_conv_kernel_size": 4,
            "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1, "n_group": 4, "topk_group": 2,
            "norm_topk_prob": True, "rope_theta": 6000000, "routed_scaling_factor": 2.5, "hidden_act": "silu",
            "num_nextn_predict_layers": 0, "rope_scaling": None,
        },
        has_experts=True,
        is_captured=False,
        has_names_of_adapters=False,
    ),
    "Jamba": Published(
        "JambaForCausalLM",
        _SIZES | {
            "model_type": "jamba", "num_hidden_layers": 6, "attn_layer_offset": 2, "attn_layer_period": 3,
            "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_conv_bias": True, "mamba_d_conv": 4,
            "mamba_d_state": 16, "mamba_dt_rank": 8, "mamba_expand": 2, "mamba_proj_bias": False, "num_experts": 4,
            "num_experts_per_tok": 2, "num_logits_to_keep": 1, "rms_norm_eps": 1e-06, "sliding_window": None,
            "use_mamba_kernels": True, "hidden_act": "silu",
        },
        has_experts=True,
        is_captured=False,
    ),
    "Mamba": Published("MambaForCausalLM", _MAMBA | {"model_type": "mamba"}, is_captured=False, adapter_spread=0.3),
    "FalconMamba": Published(
        "FalconMambaForCausalLM",
        _MAMBA | {"model_type": "falcon_mamba", "mixer_rms_eps": 1e-06, "tie_word_embeddings": False},
        has_other_names=False,
    ),
    "MiniMax": Published(
        "MiniMaxForCausalLM",
        _SIZES | {
            "model_type": "minimax", "num_hidden_layers": 6, "head_dim": 16, "block_size": 32, "hidden_act": "silu",
            "layer_types": [*["linear_attention"] * 2, "full_attention"] * 2, "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 1.0, "linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 1.0,
            "mlp_alpha_factor": 1.5, "mlp_beta_factor": 1.0, "num_experts_per_tok": 2, "num_local_experts": 4,
            "rms_norm_eps": 1e-05, "rope_theta": 10000000, "sliding_window": None, "router_jitter_noise": 0.0,
        },
        has_experts=True,
        is_captured=False,
    ),
    "Zamba2": Published(
        "Zamba2ForCausalLM",
        {name: value for name, value in _SIZES.items() if not name.startswith("tie_")} | {
            "model_type": "zamba2", "num_hidden_layers": 6, "num_key_value_heads": 4, "adapter_rank": 8,
            "add_bias_linear": False, "attention_dropout": 0.0, "chunk_size": 32, "hidden_act": "gelu",
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"], "mamba_d_conv": 4,
            "hybrid_layer_ids": [1, 3, 4], "mamba_d_state": 16, "mamba_expand": 2, "mamba_headdim": 16,
            "mamba_ngroups": 2, "n_mamba_heads": 8, "num_mem_blocks": 2, "num_logits_to_keep": 1, "rope_theta": 10000,
            "rms_norm_eps": 1e-05, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 1e-09,
            "use_conv_bias": True, "use_long_context": False, "use_mamba_kernels": True, "use_mem_rope": True,
            "use_shared_attention_adapter": True, "use_shared_mlp_adapter": True,
        },
        is_captured=False,
    ),
    "Lfm3": Published(
        "Lfm3ForCausalLM",
        _SIZES | {
            "model_type": "lfm3", "num_hidden_layers": 6, "head_dim": 16, "conv_L_cache": 7, "conv_bias": False,
            "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv"], "norm_eps": 1e-05,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 20, "use_attention_gate": True, "use_sandwich_norm": True,
        },
        is_captured=False,
        renamed=("g_proj",),
    ),
}  # fmt: skip
# Of those that have the same names here and in transformers.
ADAPTED = [
    "q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "a_proj", "b_proj", "in_proj", "out_proj", "x_proj",
]  # fmt: skip
