"""GPT-2: learned positions, norms first, biases everywhere, tied output head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from llmstack_model_runner.models.config_values import read_bool, refuse
from llmstack_model_runner.models.decoder_fields import DecoderFields, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder, PositionTable

_FIELDS = DecoderFields(
    size=("n_embd", 768), num_layers=("n_layer", 12), num_heads=("n_head", 12), inner_size=("n_inner", None),
    max_model_len=("n_positions", 1024), vocab_size=("vocab_size", 50257), eps="layer_norm_epsilon",
    activation=("activation_function", "gelu_new"), is_tied=True,
)  # fmt: skip
_NAMES = BlockNames("ln_1", "ln_2", ("attn.c_attn",), "attn.c_proj", ("mlp.c_fc",), "mlp.c_proj")


class GPT2(LayerNormDecoder):
    """`GPT2LMHeadModel`; its checkpoints store transposed matrices."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        refuse(config, "add_cross_attention", False)
        settings = read_decoder(
            config, _FIELDS, _NAMES, tokens="transformer.wte", layers="transformer.h.", norm="transformer.ln_f",
            positions=PositionTable("transformer.wpe"), is_transposed=True,
        )  # fmt: skip
        return replace(settings, attention_scales=_attention_scales(config, settings))


def _attention_scales(config: Mapping[str, Any], settings: DecoderSettings) -> tuple[float, ...]:
    scale = settings.block.head_dim**-0.5 if read_bool(config, "scale_attn_weights", True) else 1.0
    is_by_layer = read_bool(config, "scale_attn_by_inverse_layer_idx", False)
    return tuple(scale / (index + 1 if is_by_layer else 1) for index in range(settings.num_layers))
