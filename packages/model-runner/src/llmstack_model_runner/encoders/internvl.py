"""InternVL's tower over square crops: a class token and scaled layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_model_runner.encoders.layer import LayerSettings, read_layer_settings
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.patches import PatchEmbedding, unfold
from llmstack_model_runner.encoders.vector import Vector
from llmstack_model_runner.encoders.vision_config import vision_int
from llmstack_model_runner.layers import LayerNorm, Linear, RMSNorm, WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import linear_activation

_INTERNVL: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-6,
}  # fmt: skip
_NORMS = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}


class InternVLTower:
    """A class token and patches with learned positions, and layers whose outputs are scaled.

    Attributes:
        size: Width of a hidden state; `inner_size` is that of the feed-forward.
        side: Patches along a side of a crop.
        num_layers: The number of its layers.
    """

    def __init__(self, prefix: str, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        settings = read_layer_settings(config, _INTERNVL)
        self.size, self.inner_size = settings.size, settings.inner_size
        self.patch_size = vision_int(config, "patch_size", _INTERNVL)
        self.side = vision_int(config, "image_size", _INTERNVL) // self.patch_size
        self.num_layers = vision_int(config, "num_hidden_layers", _INTERNVL)
        for name, allowed in (("use_absolute_position_embeddings", True), ("use_mask_token", False)):
            if config.get(name) not in (None, allowed):
                raise ValueError(f"config.json: vision_config.{name} {str(config[name])[:64]} is not supported.")
        window = (vision_int(config, "num_channels", _INTERNVL), self.patch_size, self.patch_size)
        self._class = Vector(f"{prefix}embeddings.cls_token", (1, 1, self.size), dtype, device)
        positions = (1, self.side**2 + 1, self.size)
        self._positions = Vector(f"{prefix}embeddings.position_embeddings", positions, dtype, device)
        self._patches = PatchEmbedding(
            f"{prefix}embeddings.patch_embeddings.projection", window, self.size, has_bias=True, dtype=dtype,
            device=device,
        )  # fmt: skip
        self._layers = [
            _Layer(f"{prefix}encoder.layer.{number}.", settings, config, dtype, device)
            for number in range(self.num_layers)
        ]
        has_norm = config.get("use_mean_pooling") is False
        name = f"{prefix}layernorm"
        self._norm = LayerNorm(name, self.size, settings.eps, dtype=dtype, device=device) if has_norm else None

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._class, self._positions, self._patches, *self._layers, self._norm])

    def enter(self, values: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer, of crops [num_crops, channels, height, width]."""
        patches = self._patches(unfold(values, self.patch_size)).view(len(values), -1, self.size)
        first = self._class.value.expand(len(values), 1, self.size)
        hidden: torch.Tensor = torch.cat((first, patches), dim=1) + self._positions.value
        return hidden.flatten(0, 1)

    def layer(self, number: int, num_rows: int) -> LayerRun:
        """A layer, in which the hidden states of one crop attend to each other."""
        return LayerRun(self._layers[number], range(0, num_rows + 1, self.side**2 + 1))

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the patches: [num_crops, side, side, size]."""
        normed = hidden if self._norm is None else self._norm(hidden)
        crops = normed.view(-1, self.side**2 + 1, self.size)
        return crops[:, 1:].reshape(-1, self.side, self.side, self.size)


class _Layer:
    def __init__(
        self, prefix: str, settings: LayerSettings, config: Mapping[str, Any], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        size, inner_size = settings.size, settings.inner_size
        make_norm = _NORMS.get(str(config.get("norm_type") or "layer_norm"))
        if make_norm is None:
            raise ValueError(f"config.json: vision_config.norm_type must be one of {', '.join(_NORMS)}.")
        self._num_heads = settings.num_heads
        self.scale = (size // settings.num_heads) ** -0.5

        def linear(in_features: int, out_features: int, *names: str, has_bias: bool = True) -> Linear:
            parts = {prefix + name: out_features for name in names}
            return Linear(in_features, parts, has_bias=has_bias, dtype=dtype, device=device, keeps_precision=True)

        self._norm, self._mlp_norm = (
            make_norm(prefix + name, size, settings.eps, dtype=dtype, device=device)
            for name in ("layernorm_before", "layernorm_after")
        )
        has_bias = config.get("attention_bias") is True
        heads = [f"attention.{name}_proj" for name in ("q", "k", "v")]
        self._qkv = linear(size, size, *heads, has_bias=has_bias)
        names = ("q_norm", "k_norm") if config.get("use_qk_norm") is True else ()
        self._head_norms = [
            RMSNorm(f"{prefix}attention.{name}", size, 1e-6, dtype=dtype, device=device) for name in names
        ]
        self._out = linear(size, size, "attention.projection_layer")
        self._mlp_in, self._mlp_out = linear(size, inner_size, "mlp.fc1"), linear(inner_size, size, "mlp.fc2")
        self._activation = linear_activation(settings.activation)
        self._scales = [Vector(prefix + name, (size,), dtype, device) for name in ("lambda_1", "lambda_2")]

    def slots(self) -> dict[str, WeightSlot]:
        linears = [self._qkv, self._out, self._mlp_in, self._mlp_out]
        norms = collect_slots([self._norm, self._mlp_norm, *self._head_norms])
        return norms | collect_slots(linears) | collect_slots(self._scales)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of some rows, as `RowLayer` says."""
        parts = list(self._qkv(self._norm(hidden)).chunk(3, dim=-1))
        for number, norm in enumerate(self._head_norms):
            parts[number] = norm(parts[number].contiguous())
        return torch.stack([part.unflatten(-1, (self._num_heads, -1)) for part in parts], dim=1)

    def join(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rows behind the layer, as `RowLayer` says."""
        hidden = hidden + self._scales[0].value * self._out(attended)
        inner = self._mlp_in(self._mlp_norm(hidden), self._activation)
        return hidden + self._scales[1].value * self._mlp_out(inner)
