"""Pictures of InternVL: crops and the whole, and squares of patches joined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageProcessor
from llmstack_model_runner.encoders.image_encoder import EachCropEncoder
from llmstack_model_runner.encoders.internvl import InternVLTower
from llmstack_model_runner.encoders.two_linears import TwoLinears
from llmstack_model_runner.encoders.vision_config import vision_fields
from llmstack_model_runner.layers import LayerNorm
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.config_values import read_float, refuse
from llmstack_types import MediaItem

_PROJECTOR = "multi_modal_projector."


class InternVLEncoder(EachCropEncoder):
    """The layout of an item begins with the number of its crops."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", _PROJECTOR)
    _tower: InternVLTower

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        refuse(whole, "vision_feature_layer", -1)
        refuse(whole, "vision_feature_select_strategy", "default")
        tower = InternVLTower("vision_tower.", vision_fields(whole), dtype, device)
        super().__init__(processor, tower.num_layers, (tower.size, tower.inner_size), dtype, device)
        self._tower = tower
        self._factor = round(1 / read_float(whole, "downsample_ratio", 0.5))
        side = tower.side * tower.patch_size
        if self._crop_shape != (3, side, side) or tower.side % self._factor:
            raise ValueError(f"Crops of shape {list(self._crop_shape)} do not fit an encoder of {side} pixels.")
        size = tower.size * self._factor**2
        self._norm = LayerNorm(f"{_PROJECTOR}layer_norm", size, 1e-5, dtype=dtype, device=device)
        self._project = TwoLinears(whole, size, text_size, dtype, device, has_bias=True)
        self._parts = (tower, self._norm, self._project)

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for each square of patches."""
        side, factor = self._tower.side // self._factor, self._factor
        squares = self._tower.leave(state[0]).reshape(-1, side, factor, side, factor, self._tower.size)
        joined = squares.transpose(2, 3).reshape(-1, factor**2 * self._tower.size)
        return self._project(self._norm(joined))
