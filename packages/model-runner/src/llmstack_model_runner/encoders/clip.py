"""CLIP's tower over square pictures, up to the layer whose states are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_model_runner.encoders.layer import QUICK_GELU, EncoderLayer, read_layer_settings
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.patches import PatchEmbedding, unfold
from llmstack_model_runner.encoders.vector import Vector
from llmstack_model_runner.encoders.vision_config import vision_int
from llmstack_model_runner.layers import Embedding, LayerNorm, WeightSlot, collect_slots

_CLIP: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 32, "hidden_act": QUICK_GELU, "layer_norm_eps": 1e-5, "num_channels": 3,
}  # fmt: skip


class ClipTower:
    """A class token and patches with learned positions, a norm, and layers with norms first.

    Attributes:
        size: Width of a hidden state; `inner_size` is that of the feed-forward.
        length: Hidden states of a crop: the class token's and those of its patches.
    """

    def __init__(
        self, prefix: str, config: Mapping[str, Any], last_state: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`last_state`: Whose states are used, by the number of layers before them; from the end if negative.

        Raises:
            ValueError: There are no such states, or a size is none.
        """
        settings = read_layer_settings(config, _CLIP)
        self.size, self.inner_size = settings.size, settings.inner_size
        self.patch_size = vision_int(config, "patch_size", _CLIP)
        self.image_size = vision_int(config, "image_size", _CLIP)
        self.length = (self.image_size // self.patch_size) ** 2 + 1
        total = vision_int(config, "num_hidden_layers", _CLIP)
        self.num_layers = last_state if last_state >= 0 else total + 1 + last_state
        if not 1 <= self.num_layers <= total:
            raise ValueError(f"config.json: vision_feature_layer {last_state} is not among {total} layers.")
        window = (vision_int(config, "num_channels", _CLIP), self.patch_size, self.patch_size)
        self._class = Vector(f"{prefix}embeddings.class_embedding", (self.size,), dtype, device)
        self._patches = PatchEmbedding(
            f"{prefix}embeddings.patch_embedding", window, self.size, has_bias=False, dtype=dtype, device=device
        )
        self._positions = Embedding(
            f"{prefix}embeddings.position_embedding", self.length, self.size, dtype=dtype, device=device
        )
        self._norm = LayerNorm(f"{prefix}pre_layrnorm", self.size, settings.eps, dtype=dtype, device=device)
        self._layers = [
            EncoderLayer(f"{prefix}encoder.layers.{number}.", settings, dtype, device)
            for number in range(self.num_layers)
        ]

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._class, self._patches, self._positions, self._norm, *self._layers])

    def enter(self, values: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer, of crops [num_crops, channels, height, width]."""
        patches = self._patches(unfold(values, self.patch_size)).view(len(values), -1, self.size)
        first = self._class.value.expand(len(values), 1, self.size)
        hidden: torch.Tensor = torch.cat((first, patches), dim=1) + self._positions.weight
        return self._norm(hidden.flatten(0, 1))

    def layer(self, number: int, num_rows: int) -> LayerRun:
        """A layer, in which the hidden states of one crop attend to each other."""
        return LayerRun(self._layers[number], range(0, num_rows + 1, self.length))
