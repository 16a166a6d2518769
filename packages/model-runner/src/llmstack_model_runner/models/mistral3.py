"""Pictures of Mistral 3: Pixtral's tower, and squares of patches merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageProcessor
from llmstack_model_runner.encoders.image_encoder import ImageEncoder
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.pixtral import PixtralTower
from llmstack_model_runner.encoders.two_linears import TwoLinears
from llmstack_model_runner.encoders.vision_config import vision_fields
from llmstack_model_runner.layers import Linear, RMSNorm
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.config_values import read_bool, read_float, read_int, refuse
from llmstack_types import MediaItem

_PROJECTOR = "multi_modal_projector."


class Mistral3Encoder(ImageEncoder):
    """The layout of an item is (1, rows, columns) of patches before merging."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", _PROJECTOR)

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        refuse(whole, "vision_feature_layer", -1)
        tower = PixtralTower("vision_tower.", vision_fields(whole), dtype, device)
        super().__init__(processor, tower.num_layers, (tower.size, tower.inner_size), dtype, device)
        self._tower = tower
        self._merge = read_int(whole, "spatial_merge_size", 2)
        eps = read_float(whole["text_config"], "rms_norm_eps", 1e-5)
        self._norm = RMSNorm(f"{_PROJECTOR}norm", tower.size, eps, dtype=dtype, device=device)
        has_bias = read_bool(whole, "multimodal_projector_bias", False)
        self._merger = Linear(
            tower.size * self._merge**2, {f"{_PROJECTOR}patch_merger.merging_layer": tower.size}, has_bias=False,
            dtype=dtype, device=device, keeps_precision=True,
        )  # fmt: skip
        self._project = TwoLinears(whole, tower.size, text_size, dtype, device, has_bias=has_bias)
        self._parts = (tower, self._norm, self._merger, self._project)

    def _shape(self, item: MediaItem) -> tuple[int, ...]:
        layout = item.layout
        is_grid = len(layout) == 3 and layout[0] == 1 and not any(side % self._merge for side in layout[1:])
        return (1, 3, *(side * self._tower.patch_size if is_grid else 0 for side in (*layout, 0, 0, 0)[1:3]))

    def _enter(self, item: MediaItem, values: torch.Tensor) -> EncoderState:
        return self._tower.enter(values)

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        return self._tower.layer(number, state[1])

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for each square of patches."""
        (_, rows, columns), merge = item.layout, self._merge
        squares = self._norm(state[0]).view(rows // merge, merge, columns // merge, merge, self._tower.size)
        merged = self._merger(squares.permute(0, 2, 4, 1, 3).reshape(-1, self._tower.size * merge**2))
        return self._project(merged)
