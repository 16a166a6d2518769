"""StableLM: Llama's gated feed-forward with layer norms, and a rotary embedding of a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int, refuse
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder


class StableLM(LayerNormDecoder):
    """`StableLmForCausalLM`; norms of single heads (StableLM 2 12B) are refused."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        """The configuration, checked."""
        refuse(config, "qk_layernorm", False)
        size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        head_dim = read_head_dim(size, num_heads)
        max_model_len = read_int(config, "max_position_embeddings", 4096)
        is_parallel = read_bool(config, "use_parallel_residual", False)
        return DecoderSettings(
            tokens="model.embed_tokens",
            layers="model.layers.",
            norm="model.norm",
            vocab_size=read_int(config, "vocab_size"),
            max_model_len=max_model_len,
            num_layers=read_int(config, "num_hidden_layers"),
            rope=parse_rope({"partial_rotary_factor": 0.25, **config}, head_dim, max_model_len),
            is_tied=read_bool(config, "tie_word_embeddings", False),
            block=BlockSettings(
                names=BlockNames(
                    attention_norm="input_layernorm",
                    mlp_norm=None if is_parallel else "post_attention_layernorm",
                    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    attention_out="self_attn.o_proj",
                    mlp_in=("mlp.gate_proj", "mlp.up_proj"),
                    mlp_out="mlp.down_proj",
                ),
                hidden_size=size,
                inner_size=read_int(config, "intermediate_size"),
                num_heads=num_heads,
                num_kv_heads=read_int(config, "num_key_value_heads", num_heads),
                head_dim=head_dim,
                eps=read_float(config, "layer_norm_eps", 1e-5),
                activation=str(config.get("hidden_act") or "silu"),
                is_parallel=is_parallel,
                has_qkv_bias=read_bool(config, "use_qkv_bias", False),
                has_attention_out_bias=False,
                has_mlp_bias=False,
            ),
        )
