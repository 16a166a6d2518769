"""Phi family: Phi 1 to 4.

Phi 1, 1.5 and 2 compute attention and feed-forward in parallel after one norm, with biases everywhere, also in the
head. Phi-3 and Phi-4 are Llama with joined projections, RoPE over a part of each head, and one sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.models.config_values import read_int
from llmstack_model_runner.models.layer_norm_block import BlockNames
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder, read_rotary_decoder
from llmstack_model_runner.models.llama import Llama, Settings, read_llama

_NAMES = BlockNames(
    attention_norm="input_layernorm",
    mlp_norm=None,
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attention_out="self_attn.dense",
    mlp_in=("mlp.fc1",),
    mlp_out="mlp.fc2",
)


class Phi(LayerNormDecoder):
    """`PhiForCausalLM`: Phi 1, 1.5 and 2."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        return read_rotary_decoder(
            config,
            _NAMES,
            norm="model.final_layernorm",
            max_model_len=2048,
            partial_rotary_factor=0.5,
            activation="gelu_new",
            has_head_bias=True,
            inner_size=read_int(config, "intermediate_size", 4 * read_int(config, "hidden_size")),
            is_parallel=True,
        )


class Phi3(Llama):
    """`Phi3ForCausalLM`; `longrope` uses its long factors if contexts longer than the original are served."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
        complete = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config, "layer_types": None}
        return read_llama(complete, window, is_partly_rotated=True, has_fused_projections=True)
