"""GPT-J: parallel attention and feed-forward, RoPE on neighbouring dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers.rotary import RopeParameters
from llmstack_model_runner.models.config_values import read_int
from llmstack_model_runner.models.decoder_fields import DecoderFields, read_decoder
from llmstack_model_runner.models.layer_norm_block import BlockNames
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_FIELDS = DecoderFields(
    size=("n_embd", 4096), num_layers=("n_layer", 28), num_heads=("n_head", 16), inner_size=("n_inner", None),
    max_model_len=("n_positions", 2048), eps="layer_norm_epsilon", activation=("activation_function", "gelu_new"),
)  # fmt: skip
_QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
_NAMES = BlockNames("ln_1", None, _QKV, "attn.out_proj", ("mlp.fc_in",), "mlp.fc_out")


class GPTJ(LayerNormDecoder):
    """`GPTJForCausalLM`, whose query and key rows are reordered at load."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        settings = read_decoder(
            config, _FIELDS, _NAMES, tokens="transformer.wte", layers="transformer.h.", norm="transformer.ln_f",
            has_head_bias=True, is_parallel=True, has_qkv_bias=False, has_attention_out_bias=False,
        )  # fmt: skip
        block, rotary_dim = settings.block, read_int(config, "rotary_dim", 64)
        if rotary_dim % 2 or rotary_dim > block.head_dim:
            raise ValueError(f"config.json: rotary_dim {rotary_dim} must be even and at most {block.head_dim}.")
        order = _halved_rows(block.num_heads, block.head_dim, rotary_dim)
        rope = RopeParameters(10_000.0, rotary_dim, settings.max_model_len)
        return replace(settings, rope=rope, block=replace(block, qkv_row_orders=(order, order, None)))


def _halved_rows(num_heads: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Row order that puts even dimensions before odd ones, so that RoPE rotates halves, as in other models.

    Scores do not change, since queries and keys are reordered alike.
    """
    rotated = torch.arange(rotary_dim).view(-1, 2).t().reshape(-1)
    order = torch.cat((rotated, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(num_heads)[:, None] * head_dim + order).reshape(-1)
