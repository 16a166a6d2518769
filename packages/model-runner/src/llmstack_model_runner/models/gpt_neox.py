"""GPT-NeoX and Pythia: parallel residual, partial RoPE, q, k and v interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.models.config_values import read_bool, read_float
from llmstack_model_runner.models.decoder_fields import DecoderFields, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames, ungrouped_rows
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_NAMES = BlockNames(
    "input_layernorm", "post_attention_layernorm", ("attention.query_key_value",), "attention.dense",
    ("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h",
)  # fmt: skip


class GPTNeoX(LayerNormDecoder):
    """`GPTNeoXForCausalLM`: GPT-NeoX, Pythia and Dolly."""

    root: ClassVar[str] = "gpt_neox."
    renamed: ClassVar[Mapping[str, str]] = {"embed_out.": "lm_head."}

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        has_bias = read_bool(config, "attention_bias", True)
        share = read_float(config, "rotary_pct", 0.25)
        older = {"partial_rotary_factor": share, "rope_theta": read_float(config, "rotary_emb_base", 10_000.0)}
        settings = read_decoder(
            {**config, **older}, DecoderFields(), _NAMES, tokens="gpt_neox.embed_in", layers="gpt_neox.layers.",
            norm="gpt_neox.final_layer_norm", rotary_share=share,
            is_parallel=read_bool(config, "use_parallel_residual", True), has_qkv_bias=has_bias,
            has_attention_out_bias=has_bias,
        )  # fmt: skip
        rows = ungrouped_rows(settings.block.num_heads, 1, settings.block.head_dim)
        return replace(settings, block=replace(settings.block, qkv_row_orders=(rows,)))
