"""Pictures of LLaVA 1.5 and LLaVA-NeXT: CLIP, and a feed-forward behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageProcessor, LlavaNextImageProcessor
from llmstack_model_runner.encoders.clip import ClipTower
from llmstack_model_runner.encoders.image_encoder import EachCropEncoder
from llmstack_model_runner.encoders.two_linears import TwoLinears
from llmstack_model_runner.encoders.vector import Vector
from llmstack_model_runner.encoders.vision_config import vision_fields
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.config_values import read_bool
from llmstack_types import MediaItem


class LlavaEncoder(EachCropEncoder):
    """One crop of a fixed size."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    _tower: ClipTower

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        last_state = whole.get("vision_feature_layer", -2)
        if type(last_state) is not int:
            raise ValueError("config.json: vision_feature_layer must be an integer: one layer's states are used.")
        strategy = whole.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full"):
            raise ValueError(f"config.json: vision_feature_select_strategy {str(strategy)[:64]!r} is unknown.")
        tower = ClipTower("vision_tower.", vision_fields(whole), last_state, dtype, device)
        super().__init__(processor, tower.num_layers, (tower.size, tower.inner_size), dtype, device)
        if self._crop_shape != (3, tower.image_size, tower.image_size):
            raise ValueError(f"Pictures of shape {list(self._crop_shape)} do not fit an encoder of {tower.image_size}.")
        self.ignored = (
            "vision_tower.post_layernorm.", "vision_tower.embeddings.position_ids",
            "vision_tower.encoder.layers.",  # those behind the states that are used
        )  # fmt: skip
        self._tower, self._has_class = tower, strategy == "full"
        has_bias = read_bool(whole, "multimodal_projector_bias", True)
        self._linears = TwoLinears(whole, tower.size, text_size, dtype, device, has_bias=has_bias)
        self._parts = [tower, self._linears]

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for each patch, and one of the class token where the configuration asks for it."""
        return self._project(state).flatten(0, 1)

    def _project(self, state: EncoderState) -> torch.Tensor:
        """Vectors of each crop [num_crops, length, text_size]."""
        hidden = state[0].view(-1, self._tower.length, self._tower.size)
        chosen = hidden if self._has_class else hidden[:, 1:]
        vectors = self._linears(chosen.flatten(0, 1))
        return vectors.view(len(chosen), -1, vectors.shape[1])


class LlavaNextEncoder(LlavaEncoder):
    """A picture whole, and in tiles without the borders that fill up their grid; a vector ends each row of these.

    The layout of an item is (tiles with the whole picture, its height, its width).
    """

    prefixes: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.", "image_newline")

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(whole, text_size, processor, dtype, device)
        if not isinstance(processor, LlavaNextImageProcessor) or self._has_class:
            raise ValueError("LLaVA-NeXT needs its own image processor, and leaves out the class token.")
        self._processor = processor
        self._newline = Vector("image_newline", (text_size,), dtype, device)
        self._parts = [*self._parts, self._newline]

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        vectors = self._project(state)
        _, height, width = item.layout
        rows, columns = (length // self._processor.side for length in self._processor.best_grid(height, width))
        side = self._processor.side // self._processor.patch_size
        tiles = vectors[1:].view(rows, columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        top, left = self._processor.borders(height, width)
        inner = tiles[top : tiles.shape[0] - top, left : tiles.shape[1] - left]
        ends = self._newline.value.expand(len(inner), 1, -1)
        return torch.cat((vectors[0], torch.cat((inner, ends), dim=1).flatten(0, 1)))
