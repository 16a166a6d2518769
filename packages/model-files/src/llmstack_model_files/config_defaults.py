"""Values that a configuration leaves out, as in transformers.

Here is what API processes need, which have no model code (vocabulary, positions), and what differs between types that
share the code of a model. The other defaults stand in that code, beside the checks of their fields, and hold for null
too. `test_config_defaults.py` of the model runner compares both with transformers, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_BAMBA: Mapping[str, Any] = {
    **_LLAMA,
    "vocab_size": 128_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
}
_MISTRAL: Mapping[str, Any] = {
    **_LLAMA,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_QWEN: Mapping[str, Any] = {
    **_LLAMA,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}
_QWEN3_NEXT: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
_QWEN2_VL: Mapping[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN2_5_OMNI: Mapping[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_GEMMA: Mapping[str, Any] = {"vocab_size": 256_000, "max_position_embeddings": 8192}
_ROBERTA: Mapping[str, Any] = {"vocab_size": 50_265, "max_position_embeddings": 512}

# What the models' own code completes is left out, except what requests depend on.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {
        "vocab_size": 157_184,
        "hidden_size": 2560,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 262_144,
    },
    "bamba": {**_BAMBA, "max_position_embeddings": 262_144},
    "bert": {"vocab_size": 30_522, "max_position_embeddings": 512},
    "bloom": {"vocab_size": 250_880},
    "deepseek_v2": {
        **_LLAMA,
        "vocab_size": 102_400,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
    },
    "distilbert": {"vocab_size": 30_522, "max_position_embeddings": 512},
    "ernie4_5": {
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
    },
    "ernie4_5_moe": {
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    "falcon_mamba": {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32},
    "falcon_h1": {**_BAMBA, "max_position_embeddings": 8192},
    "falcon": {
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "max_position_embeddings": 2048,
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072},
    "gemma4_text": {"vocab_size": 262_144, "max_position_embeddings": 131_072},
    "gemma4_unified_text": {"vocab_size": 262_144, "max_position_embeddings": 262_144},
    "glm4_moe": {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 131_072,
    },
    "gpt2": {"vocab_size": 50_257, "n_positions": 1024},
    "gpt_neox": {
        "vocab_size": 50_432,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "max_position_embeddings": 2048,
    },
    "gpt_oss": {"vocab_size": 201_088, "max_position_embeddings": 131_072},
    "gptj": {"vocab_size": 50_400, "n_positions": 2048},
    "granite": _LLAMA,
    "granitemoehybrid": _LLAMA,
    "jamba": {
        "vocab_size": 65_536,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 262_144,
    },
    "kimi_linear": {
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "model_max_length": 1_048_576,
        "rms_norm_eps": 1e-5,
    },
    "lfm2": {
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rope_theta": 1e6,
    },
    "lfm2_moe": {
        "vocab_size": 65_536,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rope_theta": 1e6,
    },
    "llama": _LLAMA,
    "mamba2": {"vocab_size": 32_768, "hidden_size": 4096, "num_hidden_layers": 64},
    "mistral": _MISTRAL,
    "lfm3": {
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128_000,
    },
    "mamba": {"vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32},
    "minimax": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
    },
    "mistral4": {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1_048_576,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "max_position_embeddings": 1_048_576,
            "partial_rotary_factor": 0.5,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mixtral": {**_MISTRAL, "sliding_window": None, "rope_theta": 1e6},
    "nemotron_h": {
        **_LLAMA,
        "vocab_size": 131_072,
        "intermediate_size": 21_504,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "olmo_hybrid": {
        "vocab_size": 100_352,
        "hidden_size": 3840,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 30,
        "max_position_embeddings": 65_536,
    },
    "opt": {"vocab_size": 50_272, "max_position_embeddings": 2048},
    "phi": {
        **_LLAMA,
        "vocab_size": 51_200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
    },
    "phi3": {
        **_LLAMA,
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    "qwen2": {**_QWEN, "max_window_layers": 28},
    "qwen2_5_omni_text": _QWEN2_5_OMNI,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": {**_QWEN, "max_window_layers": 28, "head_dim": 128},
    "qwen3_5_moe_text": {**_QWEN3_NEXT, "vocab_size": 248_320, "num_hidden_layers": 40},
    "qwen3_5_text": {
        **_QWEN3_NEXT,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_moe": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
    },
    "qwen3_vl_moe_text": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "rope_theta": 5e5,
    },
    "qwen3_vl_text": {**_QWEN, "max_position_embeddings": 128_000, "head_dim": 128, "rope_theta": 5e5},
    "roberta": _ROBERTA,
    "stablelm": {
        **_LLAMA,
        "vocab_size": 50_304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "xlm-roberta": {"vocab_size": 30_522, "max_position_embeddings": 512},
    "zamba2": {
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "num_hidden_layers": 54,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    },
}
"""`model_type` to the values of fields that are absent; a field that is null is given."""
# Names under which transformers' classes take a field too, of other fields.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embed",),
    "n_positions": ("max_position_embeddings",),
    "num_experts": ("num_local_experts",),
}


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with what it leaves out. Configurations of other types are returned unchanged."""
    defaults = DEFAULTS.get(str(config.get("model_type")), {})
    missing = {
        name: value
        for name, value in defaults.items()
        if name not in config and not any(alias in config for alias in _ALIASES.get(name, ()))
    }
    return {**missing, **config}
