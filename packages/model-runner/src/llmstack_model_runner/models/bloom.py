"""BLOOM: ALiBi, a norm after the embedding, biases everywhere, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmstack_model_runner.layers.attention import alibi_slopes
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int, refuse
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings, ungrouped_rows
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_NAMES = BlockNames(
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attention.query_key_value",),
    attention_out="self_attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
)


class Bloom(LayerNormDecoder):
    """`BloomForCausalLM`: BLOOM and BLOOMZ."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse(config, "apply_residual_connection_post_layernorm", False)
        size = read_int(config, "n_embed", read_int(config, "hidden_size", 64))
        num_heads = read_int(config, "n_head", read_int(config, "num_attention_heads", 8))
        head_dim = read_head_dim(size, num_heads)
        return DecoderSettings(
            tokens="transformer.word_embeddings",
            embedding_norm="transformer.word_embeddings_layernorm",
            layers="transformer.h.",
            norm="transformer.ln_f",
            vocab_size=read_int(config, "vocab_size"),
            max_model_len=read_int(config, "seq_length", 2048),
            num_layers=read_int(config, "n_layer", read_int(config, "num_hidden_layers", 2)),
            is_tied=read_bool(config, "tie_word_embeddings", True),
            block=BlockSettings(
                names=_NAMES,
                hidden_size=size,
                inner_size=4 * size,
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                eps=read_float(config, "layer_norm_epsilon", 1e-5),
                activation="gelu_new",
                qkv_row_orders=(ungrouped_rows(num_heads, 1, head_dim),),
                alibi_slopes=alibi_slopes(num_heads),
            ),
        )
