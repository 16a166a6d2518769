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


@dataclass(frozen=True)
class Published:
    """A class with a configuration of the hub.

    Attributes:
        has_other_names: The hub has other names of tensors than transformers.
    """

    architecture: str
    config: dict[str, Any]
    has_other_names: bool = True
    has_experts: bool = False
    is_captured: bool = True


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
}  # fmt: skip
# Of those that have the same names here and in transformers.
ADAPTED = [
    "q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "a_proj", "b_proj", "mlp.up_proj", "in_proj", "out_proj",
    "x_proj", "feed_forward.down_proj", "experts.0.up_proj",
]  # fmt: skip
