"""StableLM: gated feed-forward, layer norms, RoPE over a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.models.config_values import read_bool, read_int, refuse_variant
from llmstack_model_runner.models.decoder_fields import DecoderFields, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class StableLM(LayerNormDecoder):
    """`StableLmForCausalLM`; norms of single heads (StableLM 2 12B) are not supported."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse_variant(config, "qk_layernorm")
        is_parallel = read_bool(config, "use_parallel_residual", False)
        fields = DecoderFields(
            num_kv_heads="num_key_value_heads", inner_size=("intermediate_size", read_int(config, "intermediate_size")),
            max_model_len=("max_position_embeddings", 4096), activation=("hidden_act", "silu"),
        )  # fmt: skip
        names = BlockNames(
            "input_layernorm", None if is_parallel else "post_attention_layernorm", _QKV, "self_attn.o_proj",
            ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj",
        )  # fmt: skip
        return read_decoder(
            config, fields, names, tokens="model.embed_tokens", layers="model.layers.", norm="model.norm",
            rotary_share=0.25, is_parallel=is_parallel, has_qkv_bias=read_bool(config, "use_qkv_bias", False),
            has_attention_out_bias=False, has_mlp_bias=False,
        )  # fmt: skip
