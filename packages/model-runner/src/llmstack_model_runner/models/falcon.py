"""Falcon: multi-query or grouped-query attention, RoPE or ALiBi, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.layers.attention import alibi_slopes
from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_int
from llmstack_model_runner.models.decoder_fields import DecoderFields, present, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames, ungrouped_rows
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder


class Falcon(LayerNormDecoder):
    """`FalconForCausalLM`: Falcon 7B, 40B, 11B and RW."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        has_bias, is_alibi = read_bool(config, "bias", False), read_bool(config, "alibi", False)
        fields = DecoderFields(
            size=(present(config, "n_embed", "hidden_size"), None), inner_size=("ffn_hidden_size", None),
            eps="layer_norm_epsilon", activation=("activation", "gelu"), is_tied=True,
        )  # fmt: skip
        settings = read_decoder(
            config, fields, _names(config), tokens="transformer.word_embeddings", layers="transformer.h.",
            norm="transformer.ln_f", is_parallel=read_bool(config, "parallel_attn", True), has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias, has_mlp_bias=has_bias,
        )  # fmt: skip
        block, num_heads, head_dim = settings.block, settings.block.num_heads, settings.block.head_dim
        num_kv_heads = _num_kv_heads(config, num_heads)
        rows = ungrouped_rows(num_kv_heads, num_heads // num_kv_heads, head_dim)
        # Rounded as in Falcon's training; slopes are added before the scores are scaled.
        slopes = alibi_slopes(num_heads).bfloat16().float() * head_dim**-0.5 if is_alibi else None
        block = replace(block, num_kv_heads=num_kv_heads, qkv_row_orders=(rows,), alibi_slopes=slopes)
        rope = None if is_alibi else parse_rope(config, head_dim, settings.max_model_len)
        return replace(settings, rope=rope, block=block)


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    if read_bool(config, "new_decoder_architecture", False):
        num_kv_heads = read_int(config, "num_kv_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"config.json: {num_heads} attention heads cannot share {num_kv_heads} key-value heads.")
        return num_kv_heads
    return 1 if read_bool(config, "multi_query", True) else num_heads


def _names(config: Mapping[str, Any]) -> BlockNames:
    is_new = read_bool(config, "new_decoder_architecture", False)
    is_parallel = read_bool(config, "parallel_attn", True)
    if is_new and not is_parallel:
        raise ValueError("config.json: new_decoder_architecture without parallel_attn is not supported.")
    norms: tuple[str, str | None] = "input_layernorm", None if is_parallel else "post_attention_layernorm"
    if is_new and read_int(config, "num_ln_in_parallel_attn", 2) == 2:
        norms = "ln_attn", "ln_mlp"
    return BlockNames(
        *norms, ("self_attention.query_key_value",), "self_attention.dense", ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"
    )
