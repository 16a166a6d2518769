"""GPT-NeoX and Pythia: parallel residual, partial RoPE, q, k and v interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmstack_model_files import extended_positions
from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings, ungrouped_rows
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_NAMES = BlockNames(
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("attention.query_key_value",),
    attention_out="attention.dense",
    mlp_in=("mlp.dense_h_to_4h",),
    mlp_out="mlp.dense_4h_to_h",
)


class GPTNeoX(LayerNormDecoder):
    """`GPTNeoXForCausalLM`: GPT-NeoX, Pythia and Dolly."""

    root: ClassVar[str] = "gpt_neox."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        size, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        head_dim = read_head_dim(size, num_heads)
        max_model_len = read_int(config, "max_position_embeddings", 2048)
        has_bias = read_bool(config, "attention_bias", True)
        older = {
            "partial_rotary_factor": read_float(config, "rotary_pct", 0.25),
            "rope_theta": read_float(config, "rotary_emb_base", 10_000.0),
        }
        return DecoderSettings(
            tokens="gpt_neox.embed_in",
            layers="gpt_neox.layers.",
            norm="gpt_neox.final_layer_norm",
            vocab_size=read_int(config, "vocab_size"),
            max_model_len=extended_positions(config, max_model_len),
            num_layers=read_int(config, "num_hidden_layers"),
            rope=parse_rope({**config, **older}, head_dim, max_model_len, is_partial=True),
            is_tied=read_bool(config, "tie_word_embeddings", False),
            block=BlockSettings(
                names=_NAMES,
                hidden_size=size,
                inner_size=read_int(config, "intermediate_size", 4 * size),
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                eps=read_float(config, "layer_norm_eps", 1e-5),
                activation=str(config.get("hidden_act") or "gelu"),
                is_parallel=read_bool(config, "use_parallel_residual", True),
                has_qkv_bias=has_bias,
                has_attention_out_bias=has_bias,
                qkv_row_orders=(ungrouped_rows(num_heads, 1, head_dim),),
            ),
        )

    def rename(self, name: str) -> str:
        """Published checkpoints call the output head `embed_out`."""
        return "lm_head.weight" if name == "embed_out.weight" else name
