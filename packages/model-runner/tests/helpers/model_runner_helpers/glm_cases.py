"""Configurations of GLM 4.5 to 4.7, for comparisons with transformers."""

from __future__ import annotations

from typing import Any

GLM: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "head_dim": 16,
}  # fmt: skip
GLM_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm 4.5": ("Glm4Moe", GLM | {"attention_bias": True, "routed_scaling_factor": 1.7}),
    "glm 4.7 with norms of heads": ("Glm4Moe", GLM | {"use_qk_norm": True, "norm_topk_prob": False}),
}
