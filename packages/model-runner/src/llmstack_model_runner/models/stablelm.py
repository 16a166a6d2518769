"""StableLM: gated feed-forward, layer norms, RoPE over a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.models.config_values import read_bool, read_int
from llmstack_model_runner.models.layer_norm_block import BlockNames
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder, read_rotary_decoder


class StableLM(LayerNormDecoder):
    """`StableLmForCausalLM`; norms of single heads (StableLM 2 12B) are not supported."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        is_parallel = read_bool(config, "use_parallel_residual", False)
        names = BlockNames(
            attention_norm="input_layernorm",
            mlp_norm=None if is_parallel else "post_attention_layernorm",
            qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            attention_out="self_attn.o_proj",
            mlp_in=("mlp.gate_proj", "mlp.up_proj"),
            mlp_out="mlp.down_proj",
        )
        return read_rotary_decoder(
            config,
            names,
            norm="model.norm",
            max_model_len=4096,
            partial_rotary_factor=0.25,
            activation="silu",
            inner_size=read_int(config, "intermediate_size"),
            is_parallel=is_parallel,
            has_qkv_bias=read_bool(config, "use_qkv_bias", False),
            has_attention_out_bias=False,
            has_mlp_bias=False,
        )
