"""BLOOM: ALiBi, a norm after the embedding, biases everywhere, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.layers.attention import alibi_slopes
from llmstack_model_runner.models.config_values import refuse
from llmstack_model_runner.models.decoder_fields import DecoderFields, present, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames, ungrouped_rows
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_NAMES = BlockNames(
    "input_layernorm", "post_attention_layernorm", ("self_attention.query_key_value",), "self_attention.dense",
    ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h",
)  # fmt: skip


class Bloom(LayerNormDecoder):
    """`BloomForCausalLM`: BLOOM and BLOOMZ."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse(config, "apply_residual_connection_post_layernorm", False)
        fields = DecoderFields(
            size=(present(config, "n_embed", "hidden_size"), 64), max_model_len=("seq_length", 2048),
            num_layers=(present(config, "n_layer", "num_hidden_layers"), 2),
            num_heads=(present(config, "n_head", "num_attention_heads"), 8), eps="layer_norm_epsilon",
            is_tied=True,
        )  # fmt: skip
        settings = read_decoder(
            config, fields, _NAMES, tokens="transformer.word_embeddings", layers="transformer.h.",
            norm="transformer.ln_f", embedding_norm="transformer.word_embeddings_layernorm",
        )  # fmt: skip
        block, size, num_heads = settings.block, settings.block.hidden_size, settings.block.num_heads
        rows, slopes = ungrouped_rows(num_heads, 1, block.head_dim), alibi_slopes(num_heads)
        block = replace(
            block, inner_size=4 * size, activation="gelu_new", qkv_row_orders=(rows,), alibi_slopes=slopes
        )  # its configuration has no such fields
        return replace(settings, block=block)
