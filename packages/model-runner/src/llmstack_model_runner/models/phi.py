"""Phi family: Phi 1 to 4.

Phi 1, 1.5 and 2 compute attention and feed-forward in parallel after one norm, with biases everywhere, also in the
head. Phi-3 and Phi-4 are Llama with joined projections, RoPE over a part of each head, and one sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.models.config_values import read_int, refuse_variant
from llmstack_model_runner.models.decoder_fields import DecoderFields, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder
from llmstack_model_runner.models.llama import Llama, Settings, read_llama

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NAMES = BlockNames("input_layernorm", None, _QKV, "self_attn.dense", ("mlp.fc1",), "mlp.fc2")


class Phi(LayerNormDecoder):
    """`PhiForCausalLM`: Phi 1, 1.5 and 2."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse_variant(config, "qk_layernorm")
        fields = DecoderFields(num_kv_heads="num_key_value_heads", activation=("hidden_act", "gelu_new"))
        return read_decoder(
            config, fields, _NAMES, tokens="model.embed_tokens", layers="model.layers.", norm="model.final_layernorm",
            rotary_share=0.5, has_head_bias=True, is_parallel=True,
        )  # fmt: skip


class Phi3(Llama):
    """`Phi3ForCausalLM`; `longrope` uses its long factors if contexts longer than the original are served."""

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> Settings:
        window = None if config.get("sliding_window") is None else read_int(config, "sliding_window")
        complete = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config, "layer_types": None}
        return read_llama(complete, window, is_partly_rotated=True, has_fused_projections=True)
