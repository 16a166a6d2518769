"""SigLIP's tower over square pictures, and Idefics3's form of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_model_runner.encoders.image_encoder import CropEncoder
from llmstack_model_runner.encoders.layer import EncoderLayer, read_layer_settings
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.patches import PatchEmbedding, unfold
from llmstack_model_runner.encoders.vision_config import vision_int
from llmstack_model_runner.layers import Embedding, LayerNorm, WeightSlot, collect_slots
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_types import MediaItem

_SIGLIP: Mapping[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip


class SiglipTower:
    """Patches with learned positions, layers with norms first, and a last norm.

    Attributes:
        size: Width of a hidden state; `inner_size` is that of the feed-forward.
        side: Patches along a side of the square that positions were learned for.
    """

    def __init__(
        self, prefix: str, config: Mapping[str, Any], defaults: Mapping[str, Any], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`defaults`: Of fields of the `vision_config` that a checkpoint leaves out, where they are not SigLIP's."""
        given = {**_SIGLIP, **defaults}
        settings = read_layer_settings(config, given)
        self.size, self.inner_size = settings.size, settings.inner_size
        self.patch_size = vision_int(config, "patch_size", given)
        self.side = vision_int(config, "image_size", given) // self.patch_size
        window = (vision_int(config, "num_channels", {"num_channels": 3}), self.patch_size, self.patch_size)
        self._patches = PatchEmbedding(
            f"{prefix}embeddings.patch_embedding", window, self.size, has_bias=True, dtype=dtype, device=device
        )
        self._positions = Embedding(
            f"{prefix}embeddings.position_embedding", self.side**2, self.size, dtype=dtype, device=device
        )
        self._layers = [
            EncoderLayer(f"{prefix}encoder.layers.{number}.", settings, dtype, device)
            for number in range(vision_int(config, "num_hidden_layers", given))
        ]
        self._norm = LayerNorm(f"{prefix}post_layernorm", self.size, settings.eps, dtype=dtype, device=device)

    @property
    def num_layers(self) -> int:
        """The number of its layers."""
        return len(self._layers)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._patches, self._positions, *self._layers, self._norm])

    def enter(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer. `positions`: Of each patch of a crop, numbers of the learned ones."""
        patches = self._patches(unfold(values, self.patch_size))
        hidden: torch.Tensor = patches.view(len(values), -1, self.size) + self._positions(positions)
        return hidden.flatten(0, 1)

    def layer(self, number: int, num_rows: int, num_crops: int) -> LayerRun:
        """A layer, in which patches of one crop attend to each other."""
        return LayerRun(self._layers[number], range(0, num_rows + 1, num_rows // num_crops))

    def leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm."""
        return self._norm(hidden)


class SiglipCrops(CropEncoder):
    """An encoder of crops by SigLIP. Subclasses set `_tower`, and `_positions` of the patches of a crop."""

    _tower: SiglipTower
    _positions: torch.Tensor

    def _enter(self, item: MediaItem, values: torch.Tensor) -> EncoderState:
        return (self._tower.enter(values, self._positions),)

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        return self._tower.layer(number, len(state[0]), item.layout[0])


def bucket_positions(rows: int, columns: int, side: int, device: torch.device) -> torch.Tensor:
    """Numbers of learned positions for a crop of so many patches, as fractions of its sides: [rows * columns].

    The arithmetic is that of Idefics 2 and 3 in transformers, step by step: it decides on which side of a boundary a
    fraction lies.
    """
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    buckets = [
        torch.bucketize(
            torch.clamp(torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count)), max=1.0 - 1e-6),
            boundaries,
            right=True,
        )
        for count in (rows, columns)
    ]
    return (buckets[0][:, None] * side + buckets[1]).flatten().to(device)
