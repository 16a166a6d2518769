"""GPT-J: parallel attention and feed-forward, RoPE on neighbouring dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers.rotary import RopeParameters
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, LayerNormDecoder

_NAMES = BlockNames(
    attention_norm="ln_1",
    mlp_norm=None,
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    attention_out="attn.out_proj",
    mlp_in=("mlp.fc_in",),
    mlp_out="mlp.fc_out",
)


class GPTJ(LayerNormDecoder):
    """`GPTJForCausalLM`, whose query and key rows are reordered at load."""

    root: ClassVar[str] = "transformer."

    @classmethod
    def read_settings(cls, config: Mapping[str, Any]) -> DecoderSettings:
        size, num_heads = read_int(config, "n_embd", 4096), read_int(config, "n_head", 16)
        head_dim = read_head_dim(size, num_heads)
        rotary_dim = read_int(config, "rotary_dim", 64)
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise ValueError(f"config.json: rotary_dim {rotary_dim} must be even and at most {head_dim}.")
        max_model_len = read_int(config, "n_positions", 2048)
        order = _halved_rows(num_heads, head_dim, rotary_dim)
        return DecoderSettings(
            tokens="transformer.wte",
            layers="transformer.h.",
            norm="transformer.ln_f",
            vocab_size=read_int(config, "vocab_size"),
            max_model_len=max_model_len,
            num_layers=read_int(config, "n_layer", 28),
            rope=RopeParameters(10_000.0, rotary_dim, max_model_len),
            is_tied=read_bool(config, "tie_word_embeddings", False),
            has_head_bias=True,
            block=BlockSettings(
                names=_NAMES,
                hidden_size=size,
                inner_size=read_int(config, "n_inner", 4 * size),
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                eps=read_float(config, "layer_norm_epsilon", 1e-5),
                activation=str(config.get("activation_function") or "gelu_new"),
                is_parallel=True,
                has_qkv_bias=False,
                has_attention_out_bias=False,
                qkv_row_orders=(order, order, None),
            ),
        )


def _halved_rows(num_heads: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Row order that puts even dimensions before odd ones, so that RoPE rotates halves, as in other models.

    Scores do not change, since queries and keys are reordered alike.
    """
    rotated = torch.arange(rotary_dim).view(-1, 2).t().reshape(-1)
    order = torch.cat((rotated, torch.arange(rotary_dim, head_dim)))
    return (torch.arange(num_heads)[:, None] * head_dim + order).reshape(-1)
