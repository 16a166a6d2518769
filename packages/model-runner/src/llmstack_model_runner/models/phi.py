"""Phi 1, 1.5 and 2: attention and feed-forward side by side after one norm, biases everywhere, also in the head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int, refuse
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_NAMES = BlockNames(
    attention_norm="input_layernorm",
    mlp_norm=None,
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.dense",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)


class Phi(LayerNormDecoder):
    """`PhiForCausalLM`."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        """The configuration, checked."""
        refuse(config, "qk_layernorm", False)
        size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        head_dim = read_head_dim(size, num_heads)
        max_model_len = read_int(config, "max_position_embeddings", 2048)
        return DecoderSettings(
            tokens="model.embed_tokens",
            layers="model.layers.",
            norm="model.final_layernorm",
            vocab_size=read_int(config, "vocab_size"),
            max_model_len=max_model_len,
            num_layers=read_int(config, "num_hidden_layers"),
            rope=parse_rope({"partial_rotary_factor": 0.5, **config}, head_dim, max_model_len),
            is_tied=read_bool(config, "tie_word_embeddings", False),
            has_head_bias=True,
            block=BlockSettings(
                names=_NAMES,
                hidden_size=size,
                inner_size=read_int(config, "intermediate_size", 4 * size),
                num_heads=num_heads,
                num_kv_heads=read_int(config, "num_key_value_heads", num_heads),
                head_dim=head_dim,
                eps=read_float(config, "layer_norm_eps", 1e-5),
                activation=str(config.get("hidden_act") or "gelu_new"),
                is_parallel=True,
            ),
        )
