"""Configurations of models with states other than those of Mamba-2, for comparisons with transformers."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
OLMO_HYBRID = _SIZES | {
    "num_hidden_layers": 5, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 20, "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}  # fmt: skip
MAMBA = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 6, "initializer_range": 0.2,
    "time_step_rank": 5,
}  # fmt: skip
JAMBA = _SIZES | {
    "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 5, "num_experts_per_tok": 3,
    "mamba_d_state": 6, "mamba_dt_rank": 5, "initializer_range": 0.2,
}  # fmt: skip
KIMI = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 5, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "linear_head_dim": 12, "linear_num_heads": 3, "num_key_value_heads": 4,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
LING = {name: value for name, value in KIMI.items() if not name.startswith("linear_") and name != "layer_types"} | {
    "n_group": 4, "topk_group": 2, "head_dim": 12, "layer_group_size": 3, "first_k_dense_replace": 1,
}  # fmt: skip
MINIMAX = _SIZES | {
    "num_hidden_layers": 4, "num_local_experts": 5, "num_experts_per_tok": 2, "block_size": 8, "head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
LFM3 = _SIZES | {
    "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 7, "initializer_range": 0.3, "conv_L_cache": 5,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv", "sliding_attention", "conv"],
}  # fmt: skip
STATE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi linear": ("KimiLinear", KIMI),
    "kimi linear with groups of experts and latent queries": (
        "KimiLinear",
        KIMI
        | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "q_lora_rank": 24, "n_shared_experts": 2}
        | {"linear_conv_kernel_dim": 3, "mlp_layer_types": ["sparse", "dense", "dense", "sparse", "sparse"]},
    ),
    "ling 3": ("BailingHybrid", LING),
    "ling 3 with unbounded decays and latent queries": (
        "BailingHybrid",
        LING | {"kda_safe_gate": False, "q_lora_rank": 24, "first_k_dense_replace": 2, "short_conv_kernel_size": 3},
    ),
    "lfm3": ("Lfm3", LFM3),
    "lfm3 tied, with biases and without gates": (
        "Lfm3",
        LFM3
        | {"use_attention_gate": False, "attention_bias": True, "conv_bias": True, "tie_word_embeddings": True}
        | {"layer_types": None},
    ),
    "minimax text 01": ("MiniMax", MINIMAX),
    "minimax text 01 with factors": (
        "MiniMax",
        MINIMAX
        | {"full_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.2}
        | {"mlp_beta_factor": 0.8, "head_dim": None, "tie_word_embeddings": True},
    ),
    "mamba": ("Mamba", MAMBA),
    "mamba with its own head, biases and a longer convolution": (
        "Mamba",
        MAMBA | {"use_bias": True, "tie_word_embeddings": False, "conv_kernel": 5, "time_step_rank": "auto"},
    ),
    "falcon mamba": ("FalconMamba", MAMBA | {"use_conv_bias": False}),
    "jamba": ("Jamba", JAMBA),
    "jamba without experts, tied, with biases": (
        "Jamba",
        JAMBA | {"num_experts": 1, "tie_word_embeddings": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "olmo hybrid": ("OlmoHybrid", OLMO_HYBRID),
    "olmo hybrid with rope, biases and rates below 1": (
        "OlmoHybrid",
        OLMO_HYBRID
        | {"linear_allow_neg_eigval": False, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "linear_conv_kernel_dim": 3},
    ),
}
