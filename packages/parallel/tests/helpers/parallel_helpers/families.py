"""A small model of every family whose ranks can share it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmstack_model_runner.testing import write_random_weights

LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GPT: dict[str, Any] = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
GEMMA = LLAMA | {"head_dim": 16, "tie_word_embeddings": True}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "opt": ("OPTForCausalLM", LLAMA | {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "llama": ("LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama with one kv head": ("LlamaForCausalLM", LLAMA | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral with windows": ("MistralForCausalLM", LLAMA | {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 16}),
    "granite": (
        "GraniteForCausalLM",
        LLAMA | {"residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3 with experts": (
        "Qwen3MoeForCausalLM",
        LLAMA | {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "deepseek v3": (
        "DeepseekV3ForCausalLM",
        LLAMA
        | {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24}
        | {"first_k_dense_replace": 1},
    ),
    "deepseek v3.2": (
        "DeepseekV32ForCausalLM",
        LLAMA
        | {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 24}
        | {"first_k_dense_replace": 1, "index_topk": 5, "index_n_heads": 16, "index_head_dim": 32},
    ),
    "ernie 4.5 with experts": (
        "Ernie4_5_MoeForCausalLM",
        LLAMA | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "tie_word_embeddings": True},
    ),
    "mistral 4": (
        "Mistral4ForCausalLM",
        LLAMA
        | {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "gpt oss": (
        "GptOssForCausalLM",
        LLAMA | {"head_dim": 16, "sliding_window": 7, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma 2": ("Gemma2ForCausalLM", GEMMA | {"sliding_window": 7, "query_pre_attn_scalar": 16}),
    "gemma 3": ("Gemma3ForCausalLM", GEMMA | {"sliding_window": 7, "query_pre_attn_scalar": 16}),
    "gemma 4 with experts": (
        "Gemma4ForCausalLM",
        GEMMA
        | {"sliding_window": 7, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
        | {"hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
    ),
    "phi": ("PhiForCausalLM", LLAMA | {"num_key_value_heads": 4}),
    "phi 3": ("Phi3ForCausalLM", LLAMA | {"pad_token_id": 0}),
    "gpt-neox": ("GPTNeoXForCausalLM", LLAMA | {"rotary_pct": 0.5}),
    "gpt-j": ("GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    "falcon": (
        "FalconForCausalLM",
        LLAMA | {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": True},
    ),
    "falcon with one kv head": ("FalconForCausalLM", LLAMA | {"tie_word_embeddings": True, "bias": True}),
    "falcon with alibi": ("FalconForCausalLM", LLAMA | {"alibi": True, "multi_query": False, "parallel_attn": False}),
    "bloom": ("BloomForCausalLM", LLAMA | {"n_layer": 3, "n_head": 4, "tie_word_embeddings": True}),
    "stablelm": ("StableLmForCausalLM", LLAMA),
}


def write_family(folder: Path, name: str) -> Path:
    """Writes a checkpoint of the family with random weights; returns the folder."""
    architecture, config = FAMILIES[name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return write_random_weights(folder, seed=3, spread=0.25)
