"""Configurations of Gemma 1 to 4, for comparisons with transformers."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GEMMA: dict[str, Any] = _SIZES | {
    "head_dim": 12,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # the embedding is scaled up
}
GEMMA2 = GEMMA | {"query_pre_attn_scalar": 5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
GEMMA3 = GEMMA | {"query_pre_attn_scalar": 5, "sliding_window": 7, "num_hidden_layers": 3, "head_dim": 256}
GEMMA4 = GEMMA | {
    "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 7,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0,
    "vocab_size_per_layer_input": 97,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
GEMMA_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", GEMMA | {"head_dim": 256}),
    "gemma 2": ("Gemma2", GEMMA2 | {"sliding_window": 7}),
    "gemma 2 without soft caps and with biases": (
        "Gemma2",
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma 3": ("Gemma3Text", GEMMA3 | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma 3 with linear rope and a soft cap": (
        "Gemma3Text",
        GEMMA3
        | {"sliding_window_pattern": 3, "final_logit_softcapping": 2.0}
        | {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default"}}},
    ),
    "gemma 4": ("Gemma4Text", GEMMA4),
    "gemma 4 with vectors of tokens and late layers that read earlier ones": (
        "Gemma4Text",
        GEMMA4
        | {
            "num_hidden_layers": 8,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
        },
    ),
    "gemma 4 with experts": (
        "Gemma4Text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "gemma 4 unified": ("Gemma4UnifiedText", GEMMA4),
}
