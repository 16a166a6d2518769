"""Falcon: multi-query or grouped-query attention, RoPE or ALiBi, tied head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmstack_model_runner.layers.attention import alibi_slopes
from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings, ungrouped_rows
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder


class Falcon(LayerNormDecoder):
    """`FalconForCausalLM`: Falcon 7B, 40B, 11B and RW."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        max_model_len = read_int(config, "max_position_embeddings", 2048)
        is_alibi = read_bool(config, "alibi", False)
        block = _block(config, is_alibi)
        return DecoderSettings(
            tokens="transformer.word_embeddings",
            layers="transformer.h.",
            norm="transformer.ln_f",
            vocab_size=read_int(config, "vocab_size"),
            max_model_len=max_model_len,
            num_layers=read_int(config, "num_hidden_layers"),
            rope=None if is_alibi else parse_rope(config, block.head_dim, max_model_len),
            is_tied=read_bool(config, "tie_word_embeddings", True),
            block=block,
        )


def _block(config: Mapping[str, Any], is_alibi: bool) -> BlockSettings:
    size = read_int(config, "n_embed" if config.get("n_embed") is not None else "hidden_size")
    num_heads = read_int(config, "num_attention_heads")
    head_dim = read_head_dim(size, num_heads)
    num_kv_heads = _num_kv_heads(config, num_heads)
    has_bias = read_bool(config, "bias", False)
    # Rounded as in Falcon's training; slopes are added before the scores are scaled.
    slopes = alibi_slopes(num_heads).bfloat16().float() * head_dim**-0.5
    return BlockSettings(
        names=_names(config),
        hidden_size=size,
        inner_size=read_int(config, "ffn_hidden_size", 4 * size),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=read_float(config, "layer_norm_epsilon", 1e-5),
        activation=str(config.get("activation") or "gelu"),
        is_parallel=read_bool(config, "parallel_attn", True),
        has_qkv_bias=has_bias,
        has_attention_out_bias=has_bias,
        has_mlp_bias=has_bias,
        qkv_row_orders=(ungrouped_rows(num_kv_heads, num_heads // num_kv_heads, head_dim),),
        alibi_slopes=slopes if is_alibi else None,
    )


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
        attention_norm=norms[0],
        mlp_norm=norms[1],
        qkv=("self_attention.query_key_value",),
        attention_out="self_attention.dense",
        mlp_in=("mlp.dense_h_to_4h",),
        mlp_out="mlp.dense_4h_to_h",
    )
