"""Pictures of Gemma 3: SigLIP, and the mean of each square of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageProcessor
from llmstack_model_runner.encoders.siglip import SiglipCrops, SiglipTower
from llmstack_model_runner.encoders.vision_config import vision_fields
from llmstack_model_runner.layers import Linear, RMSNorm, WeightSlot
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.config_values import read_float, read_int
from llmstack_types import MediaItem

_PROJECTION = "multi_modal_projector.mm_input_projection_weight"


class Gemma3Encoder(SiglipCrops):
    """The layout of an item is (pictures, rows of patches, columns). The vectors of one attend to each other."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    ignored = ("vision_tower.head.", "vision_tower.embeddings.position_ids")
    is_atomic = True

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        vision = vision_fields(whole)
        tower = SiglipTower("vision_tower.", vision, {}, dtype, device)
        super().__init__(processor, tower.num_layers, (tower.size, tower.inner_size), dtype, device)
        self._side = math.isqrt(read_int(whole, "mm_tokens_per_image", 256))
        is_square = self._crop_shape[1] // tower.patch_size == tower.side == self._crop_shape[2] // tower.patch_size
        if not is_square or tower.side % self._side:
            raise ValueError(
                f"Pictures of shape {list(self._crop_shape)} and {self._side**2} vectors each do not fit an encoder of "
                f"{tower.side} patches along a side."
            )
        self._tower = tower
        self._positions = torch.arange(tower.side**2, device=device)
        eps = read_float(vision, "layer_norm_eps", 1e-6)
        self._norm = RMSNorm(
            "multi_modal_projector.mm_soft_emb_norm", tower.size, eps, dtype=dtype, device=device, is_offset=True
        )
        self._projection = Linear(
            tower.size, {_PROJECTION: text_size}, has_bias=False, dtype=dtype, device=device, is_transposed=True,
            keeps_precision=True,
        )  # fmt: skip
        self._parts = (tower, self._norm)

    def slots(self) -> dict[str, WeightSlot]:
        """All of them; the matrix of the projection has no ending in its name."""
        return super().slots() | {_PROJECTION: self._projection.slots()[f"{_PROJECTION}.weight"]}

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for each square of patches."""
        side = self._tower.side // self._side
        squares = self._tower.leave(state[0]).view(-1, self._side, side, self._side, side, self._tower.size)
        return self._projection(self._norm(squares.mean((2, 4)).flatten(0, 2)))
