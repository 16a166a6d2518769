"""Pictures of Idefics3 and SmolVLM: SigLIP over crops, and patches joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageProcessor
from llmstack_model_runner.encoders.siglip import SiglipCrops, SiglipTower, bucket_positions
from llmstack_model_runner.encoders.vision_config import vision_fields
from llmstack_model_runner.layers import Linear
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.config_values import read_int
from llmstack_types import MediaItem

_IDEFICS3: Mapping[str, Any] = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}


class Idefics3Encoder(SiglipCrops):
    """The layout of an item is (crops, rows of crops, columns of crops)."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_model.", "connector.")

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        tower = SiglipTower("vision_model.", vision_fields(whole), _IDEFICS3, dtype, device)
        super().__init__(processor, tower.num_layers, (tower.size, tower.inner_size), dtype, device)
        self._tower = tower
        self._factor = read_int(whole, "scale_factor", 2)
        self._side = self._crop_shape[1] // tower.patch_size
        if self._side % self._factor:
            raise ValueError(f"config.json: {self._side} patches of a crop are no multiple of scale_factor.")
        inputs, name = tower.size * self._factor**2, "connector.modality_projection.proj"
        self._projection = Linear(
            inputs, {name: text_size}, has_bias=False, dtype=dtype, device=device, keeps_precision=True
        )
        self._positions = bucket_positions(self._side, self._side, tower.side, device)
        self._parts = (tower, self._projection)

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for each square of patches."""
        side, factor = self._side // self._factor, self._factor
        squares = self._tower.leave(state[0]).view(-1, side, factor, side, factor, self._tower.size)
        return self._projection(squares.transpose(2, 3).reshape(-1, factor**2 * self._tower.size))
