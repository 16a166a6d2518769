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
STATE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo hybrid": ("OlmoHybrid", OLMO_HYBRID),
    "olmo hybrid with rope, biases and rates below 1": (
        "OlmoHybrid",
        OLMO_HYBRID
        | {"linear_allow_neg_eigval": False, "attention_bias": True, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "linear_conv_kernel_dim": 3},
    ),
}
