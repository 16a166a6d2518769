"""OPT: learned positions counted from 2, norms first (last in the 350m), ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.models.config_values import read_bool, read_head_dim, read_int, refuse
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings
from llmstack_model_runner.models.layer_norm_decoder import (
    DecoderSettings,
    EmbeddingProjection,
    LayerNormDecoder,
    PositionTable,
)

_PREFIX = "model.decoder."
_EPS = 1e-5
_NAMES = BlockNames(
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.out_proj",
    mlp_in=("fc1",),
    mlp_out="fc2",
)


class OPT(LayerNormDecoder):
    """`OPTForCausalLM`: OPT 125m to 66b."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse(config, "layer_norm_elementwise_affine", True)
        size, num_heads = read_int(config, "hidden_size", 768), read_int(config, "num_attention_heads", 12)
        has_bias = read_bool(config, "enable_bias", True)
        is_norm_first = read_bool(config, "do_layer_norm_before", True)
        has_norm = is_norm_first and not read_bool(config, "_remove_final_layer_norm", False)
        return DecoderSettings(
            tokens=_PREFIX + "embed_tokens",
            positions=PositionTable(_PREFIX + "embed_positions", num_unused_rows=2),  # the first two were for padding
            layers=_PREFIX + "layers.",
            norm=_PREFIX + "final_layer_norm" if has_norm else None,
            vocab_size=read_int(config, "vocab_size", 50272),
            max_model_len=read_int(config, "max_position_embeddings", 2048),
            num_layers=read_int(config, "num_hidden_layers", 12),
            projection=_projection(config, size),
            is_tied=read_bool(config, "tie_word_embeddings", True),
            block=BlockSettings(
                names=_NAMES,
                hidden_size=size,
                inner_size=read_int(config, "ffn_dim", 3072),
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=read_head_dim(size, num_heads),
                eps=_EPS,
                activation=str(config.get("activation_function", "relu")),
                is_norm_first=is_norm_first,
                has_qkv_bias=has_bias,
                has_attention_out_bias=has_bias,
                has_mlp_bias=has_bias,
            ),
        )


def _projection(config: Mapping[str, Any], size: int) -> EmbeddingProjection | None:
    embedding_size = read_int(config, "word_embed_proj_dim", size)
    if embedding_size == size:
        return None
    return EmbeddingProjection(embedding_size, _PREFIX + "project_in", _PREFIX + "project_out")
