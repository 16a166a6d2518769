"""Pixtral's tower, for pictures of any shape: patches rotate by row and column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_model_runner.encoders.layer import LayerSettings, read_layer_settings
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.patches import PatchEmbedding, unfold
from llmstack_model_runner.encoders.vision_config import vision_int
from llmstack_model_runner.layers import Linear, RMSNorm, WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import linear_activation

_PIXTRAL: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "patch_size": 16, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_THETA = 10_000.0


class PixtralTower:
    """Patches, a norm, and layers with norms first.

    Attributes:
        size: Width of a hidden state; `inner_size` is that of the feed-forward.
        num_layers: The number of its layers.
    """

    def __init__(self, prefix: str, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        settings = read_layer_settings(config, _PIXTRAL)
        self.size, self.inner_size = settings.size, settings.inner_size
        self.patch_size = vision_int(config, "patch_size", _PIXTRAL)
        self.num_layers = vision_int(config, "num_hidden_layers", _PIXTRAL)
        head_dim = self.size // settings.num_heads
        if head_dim % 4 or config.get("head_dim") not in (None, head_dim):
            raise ValueError(f"config.json: vision_config has heads of {head_dim} numbers, which must be fours.")
        rope = config.get("rope_parameters")
        found = rope if isinstance(rope, Mapping) else config
        theta = float(found.get("rope_theta") or _THETA)
        self._frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
        window = (vision_int(config, "num_channels", _PIXTRAL), self.patch_size, self.patch_size)
        self._patches = PatchEmbedding(
            f"{prefix}patch_conv", window, self.size, has_bias=False, dtype=dtype, device=device
        )
        self._norm = RMSNorm(f"{prefix}ln_pre", self.size, settings.eps, dtype=dtype, device=device)
        self._layers = [
            _Layer(f"{prefix}transformer.layers.{number}.", settings, dtype, device)
            for number in range(self.num_layers)
        ]

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._patches, self._norm, *self._layers])

    def enter(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the first layer of one picture, and the angles of each patch."""
        rows, columns = (side // self.patch_size for side in values.shape[2:])
        places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = [axis.flatten()[:, None].float() * self._frequencies[start::2] for start, axis in enumerate(places)]
        return self._norm(self._patches(unfold(values, self.patch_size))), torch.cat(angles, dim=1).to(values.device)

    def layer(self, number: int, angles: torch.Tensor) -> LayerRun:
        """A layer, in which all patches attend to each other."""
        return LayerRun(self._layers[number], (0, len(angles)), angles)


class _Layer:
    def __init__(self, prefix: str, settings: LayerSettings, dtype: torch.dtype, device: torch.device) -> None:
        size, inner_size = settings.size, settings.inner_size
        self._num_heads = settings.num_heads
        self.scale = (size // settings.num_heads) ** -0.5

        def linear(in_features: int, out_features: int, *names: str) -> Linear:
            parts = {prefix + name: out_features for name in names}
            return Linear(in_features, parts, has_bias=False, dtype=dtype, device=device, keeps_precision=True)

        self._norm, self._mlp_norm = (
            RMSNorm(prefix + name, size, settings.eps, dtype=dtype, device=device)
            for name in ("attention_norm", "ffn_norm")
        )
        self._qkv = linear(size, size, "attention.q_proj", "attention.k_proj", "attention.v_proj")
        self._out = linear(size, size, "attention.o_proj")
        self._gate = linear(size, inner_size, "feed_forward.gate_proj")
        self._up = linear(size, inner_size, "feed_forward.up_proj")
        self._down = linear(inner_size, size, "feed_forward.down_proj")
        self._activation = linear_activation(settings.activation)

    def slots(self) -> dict[str, WeightSlot]:
        linears = [self._qkv, self._out, self._gate, self._up, self._down]
        return collect_slots([self._norm, self._mlp_norm]) | collect_slots(linears)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of some rows, as `RowLayer` says."""
        projected: torch.Tensor = self._qkv(self._norm(hidden)).unflatten(-1, (3, self._num_heads, -1))
        return projected

    def join(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rows behind the layer, as `RowLayer` says."""
        hidden = self._out(attended, residual=hidden)
        normed = self._mlp_norm(hidden)
        return self._down(self._gate(normed, self._activation) * self._up(normed), residual=hidden)
