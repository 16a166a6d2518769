"""OPT: learned positions counted from 2, norms first (last in the 350m), ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmstack_model_runner.models.config_values import read_bool, read_int, refuse
from llmstack_model_runner.models.decoder_fields import DecoderFields, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames
from llmstack_model_runner.models.layer_norm_decoder import (
    DecoderSettings,
    EmbeddingProjection,
    LayerNormDecoder,
    PositionTable,
)

_PREFIX = "model.decoder."
_FIELDS = DecoderFields(
    size=("hidden_size", 768), num_layers=("num_hidden_layers", 12), num_heads=("num_attention_heads", 12),
    inner_size=("ffn_dim", 3072), vocab_size=("vocab_size", 50272), eps=None,
    activation=("activation_function", "relu"), is_tied=True,
)  # fmt: skip
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
NAMES = BlockNames("self_attn_layer_norm", "final_layer_norm", _QKV, "self_attn.out_proj", ("fc1",), "fc2")
"""Those of BART's decoder, which Whisper has too."""


class OPT(LayerNormDecoder):
    """`OPTForCausalLM`: OPT 125m to 66b."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse(config, "layer_norm_elementwise_affine", True)
        has_bias = read_bool(config, "enable_bias", True)
        is_norm_first = read_bool(config, "do_layer_norm_before", True)
        has_norm = is_norm_first and not read_bool(config, "_remove_final_layer_norm", False)
        settings = read_decoder(
            config, _FIELDS, NAMES, tokens=_PREFIX + "embed_tokens", layers=_PREFIX + "layers.",
            norm=_PREFIX + "final_layer_norm" if has_norm else None,
            positions=PositionTable(_PREFIX + "embed_positions", num_unused_rows=2),  # the first two were for padding
            is_norm_first=is_norm_first, has_qkv_bias=has_bias, has_attention_out_bias=has_bias, has_mlp_bias=has_bias,
        )  # fmt: skip
        return replace(settings, projection=_projection(config, settings.block.hidden_size))


def _projection(config: Mapping[str, Any], size: int) -> EmbeddingProjection | None:
    embedding_size = read_int(config, "word_embed_proj_dim", size)
    if embedding_size == size:
        return None
    return EmbeddingProjection(embedding_size, _PREFIX + "project_in", _PREFIX + "project_out")
