"""Fields of the configurations of decoders with layer norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmstack_model_files import extended_positions
from llmstack_model_runner.layers.rotary import parse_rope
from llmstack_model_runner.models.config_values import read_bool, read_float, read_head_dim, read_int
from llmstack_model_runner.models.layer_norm_block import BlockNames, BlockSettings
from llmstack_model_runner.models.layer_norm_decoder import DecoderSettings, PositionTable

Field = tuple[str, int | None]
"""Name of a field, and what a configuration without it means; None refuses that configuration."""


@dataclass(frozen=True, slots=True)
class DecoderFields:
    """The names that a family gives to the fields of its configuration, with their defaults.

    Attributes:
        num_kv_heads: None for as many as heads.
        inner_size: Its default of None is four times the size.
        eps: None for a family without such a field. The default is 1e-5.
    """

    size: Field = ("hidden_size", None)
    num_layers: Field = ("num_hidden_layers", None)
    num_heads: Field = ("num_attention_heads", None)
    num_kv_heads: str | None = None
    inner_size: Field = ("intermediate_size", None)
    max_model_len: Field = ("max_position_embeddings", 2048)
    vocab_size: Field = ("vocab_size", None)
    eps: str | None = "layer_norm_eps"
    activation: tuple[str, str] = ("hidden_act", "gelu")
    is_tied: bool = False


def present(config: Mapping[str, Any], *names: str) -> str:
    """The first of these fields that is there and not null, else the last."""
    return next((name for name in names if config.get(name) is not None), names[-1])


def read_decoder(
    config: Mapping[str, Any],
    fields: DecoderFields,
    names: BlockNames,
    *,
    tokens: str,
    layers: str,
    norm: str | None,
    embedding_norm: str | None = None,
    positions: PositionTable | None = None,
    rotary_share: float | None = None,
    has_head_bias: bool = False,
    **block: Any,
) -> DecoderSettings:
    """Settings of a decoder; `block` has further fields of `BlockSettings`.

    `rotary_share` is the share of a head that RoPE rotates where the configuration has none; None for no RoPE.
    """
    size, num_heads = read_int(config, *fields.size), read_int(config, *fields.num_heads)
    head_dim, max_model_len = read_head_dim(size, num_heads), read_int(config, *fields.max_model_len)
    complete = {"partial_rotary_factor": rotary_share, **config}
    inner_name, inner_size = fields.inner_size
    activation, default_activation = fields.activation
    return DecoderSettings(
        tokens=tokens,
        layers=layers,
        norm=norm,
        embedding_norm=embedding_norm,
        positions=positions,
        vocab_size=read_int(config, *fields.vocab_size),
        max_model_len=max_model_len if rotary_share is None else extended_positions(config, max_model_len),
        num_layers=read_int(config, *fields.num_layers),
        rope=None if rotary_share is None else parse_rope(complete, head_dim, max_model_len, is_partial=True),
        is_tied=read_bool(config, "tie_word_embeddings", fields.is_tied),
        has_head_bias=has_head_bias,
        block=BlockSettings(
            names=names,
            hidden_size=size,
            inner_size=read_int(config, inner_name, inner_size or 4 * size),
            num_heads=num_heads,
            num_kv_heads=num_heads if fields.num_kv_heads is None else read_int(config, fields.num_kv_heads, num_heads),
            head_dim=head_dim,
            eps=1e-5 if fields.eps is None else read_float(config, fields.eps, 1e-5),
            activation=str(config.get(activation) or default_activation),
            **block,
        ),
    )
