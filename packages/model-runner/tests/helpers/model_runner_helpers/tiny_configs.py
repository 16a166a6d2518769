"""Sizes of small models, which tests of several folders change where they need others."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
LLAMA: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "intermediate_size": 56}
SMALL: dict[str, Any] = LLAMA | {"intermediate_size": 40, "pad_token_id": None}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "init_std": 0.3,
}  # fmt: skip
BERT: dict[str, Any] = SIZES | {"intermediate_size": 48}
DEEPSEEK: dict[str, Any] = LLAMA | NO_ENDS | {
    "moe_intermediate_size": 24, "num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
SHARED_PREFIX = [(7 * i + 3) % VOCAB_SIZE for i in range(20)]
PROMPTS = [SHARED_PREFIX + [(11 * i + j) % VOCAB_SIZE for j in range(1 + 3 * i)] for i in range(6)]
