"""Configurations of GLM 4.5 to 4.7, for comparisons with transformers."""

from __future__ import annotations

from typing import Any

GLM: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "head_dim": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# More than half of a whole prompt is not attended to. With fewer heads several keys of a token may score 0.
SPARSE: dict[str, Any] = GLM | {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 24,
}  # fmt: skip
GLM_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm 4.5": ("Glm4Moe", GLM | {"attention_bias": True, "routed_scaling_factor": 1.7}),
    "glm 4.7 with norms of heads": ("Glm4Moe", GLM | {"use_qk_norm": True, "norm_topk_prob": False}),
    "glm 5 beyond what it selects": ("GlmMoeDsa", SPARSE | {"n_group": 1, "topk_group": 1}),
    "glm 5 with layers that select as the one before": (
        "GlmMoeDsa",
        SPARSE | {"indexer_types": ["full", "shared", "shared"], "index_head_dim": 32},
    ),
    "deepseek v3.2 beyond what it selects": ("DeepseekV32", SPARSE | {"index_head_dim": 32}),
    "deepseek v3.2 within it, with yarn": (
        "DeepseekV32",
        SPARSE | {"index_topk": 40, "rope_parameters": YARN},
    ),
}
