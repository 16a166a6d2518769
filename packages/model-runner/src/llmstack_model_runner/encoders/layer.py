"""A layer of an encoder: attention over a crop, and a feed-forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llmstack_model_runner.layers import LayerNorm, Linear, WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import linear_activation

QUICK_GELU = "quick_gelu"


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """Sizes and names of a layer with norms first.

    Attributes:
        activation: Name in the configuration.
        names: Of the parts, in the order of `NAMES`.
        parts_without_bias: Those of queries, keys and values that have no bias.
    """

    size: int
    inner_size: int
    num_heads: int
    eps: float
    activation: str
    names: Sequence[str] = ()
    parts_without_bias: tuple[str, ...] = ()


NAMES = (
    "layer_norm1", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "layer_norm2",
    "mlp.fc1", "mlp.fc2",
)  # fmt: skip
"""Of the parts in CLIP and SigLIP."""


class EncoderLayer:
    """Norm, attention, norm and feed-forward, both added to the hidden states: a `RowLayer`."""

    def __init__(self, prefix: str, settings: LayerSettings, dtype: torch.dtype, device: torch.device) -> None:
        size = settings.size
        names = [prefix + name for name in settings.names or NAMES]
        self._num_heads = settings.num_heads
        self.scale = (size // settings.num_heads) ** -0.5

        def linear(in_features: int, parts: Mapping[str, int], without_bias: Sequence[str] = ()) -> Linear:
            return Linear(
                in_features, parts, has_bias=True, dtype=dtype, device=device, keeps_precision=True,
                parts_without_bias=without_bias,
            )  # fmt: skip

        self._norm, self._mlp_norm = (
            LayerNorm(name, size, settings.eps, dtype=dtype, device=device) for name in (names[0], names[5])
        )
        without_bias = [prefix + name for name in settings.parts_without_bias]
        self._qkv = linear(size, dict.fromkeys(names[1:4], size), without_bias)
        self._out = linear(size, {names[4]: size})
        self._mlp_in = linear(size, {names[6]: settings.inner_size})
        self._mlp_out = linear(settings.inner_size, {names[7]: size})
        self._is_quick = settings.activation == QUICK_GELU
        self._activation = "none" if self._is_quick else linear_activation(settings.activation)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._norm, self._qkv, self._out, self._mlp_norm, self._mlp_in, self._mlp_out])

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of some rows, as `RowLayer` says."""
        projected: torch.Tensor = self._qkv(self._norm(hidden)).unflatten(-1, (3, self._num_heads, -1))
        return projected

    def join(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rows behind the layer, as `RowLayer` says."""
        hidden = self._out(attended, residual=hidden)
        inner = self._mlp_in(self._mlp_norm(hidden), self._activation)
        if self._is_quick:
            inner = inner * torch.sigmoid(1.702 * inner)
        return self._mlp_out(inner, residual=hidden)


def read_layer_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> LayerSettings:
    """Settings out of a `vision_config`, whose absent fields are those of `defaults`.

    Raises:
        ValueError: A size is none, or heads do not divide the width.
    """
    given = {**defaults, **{name: value for name, value in config.items() if value is not None}}
    size, inner_size, num_heads = sizes = [
        given[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    ]
    if not all(type(value) is int and value > 0 for value in sizes) or size % num_heads:
        raise ValueError(f"config.json: vision_config has no usable sizes: {', '.join(map(str, sizes))}.")
    return LayerSettings(size, inner_size, num_heads, float(given["layer_norm_eps"]), str(given["hidden_act"]))
