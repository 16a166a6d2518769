"""GPT-2: learned positions, norms first, biases everywhere, tied output head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int, refuse
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder, PositionTable

_NAMES = BlockNames(
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    attention_out="attn.c_proj",
    mlp_in=("mlp.c_fc",),
    mlp_out="mlp.c_proj",
)


class GPT2(LayerNormDecoder):
    """`GPT2LMHeadModel`; its checkpoints store transposed matrices."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse(config, "add_cross_attention", False)
        size, num_heads = read_int(config, "n_embd", 768), read_int(config, "n_head", 12)
        head_dim = read_head_dim(size, num_heads)
        num_layers = read_int(config, "n_layer", 12)
        return DecoderSettings(
            tokens="transformer.wte",
            positions=PositionTable("transformer.wpe"),
            layers="transformer.h.",
            norm="transformer.ln_f",
            vocab_size=read_int(config, "vocab_size", 50257),
            max_model_len=read_int(config, "n_positions", 1024),
            num_layers=num_layers,
            attention_scales=_attention_scales(config, head_dim, num_layers),
            is_tied=read_bool(config, "tie_word_embeddings", True),
            block=BlockSettings(
                names=_NAMES,
                hidden_size=size,
                inner_size=read_int(config, "n_inner", 4 * size),
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                eps=read_float(config, "layer_norm_epsilon", 1e-5),
                activation=str(config.get("activation_function", "gelu_new")),
                is_transposed=True,
            ),
        )


def _attention_scales(config: Mapping[str, Any], head_dim: int, num_layers: int) -> tuple[float, ...]:
    scale = head_dim**-0.5 if read_bool(config, "scale_attn_weights", True) else 1.0
    is_by_layer = read_bool(config, "scale_attn_by_inverse_layer_idx", False)
    return tuple(scale / (index + 1 if is_by_layer else 1) for index in range(num_layers))
