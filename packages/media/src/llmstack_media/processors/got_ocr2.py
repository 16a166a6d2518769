"""InternVL, Aya Vision: a picture in the grid of tiles nearest to it, and whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import CheckpointFiles, boolean, integer
from llmstack_media.processors.fixed_size import fixed_size
from llmstack_media.processors.layout import ImageLayout, Piece
from llmstack_media.processors.processor import BICUBIC, CLIP_MEAN, CLIP_STD, ImageProcessor, channels_first, cut

_MAX_PATCHES = 256


@dataclass(frozen=True, kw_only=True)
class GotOcr2ImageProcessor(ImageProcessor):
    """The grid of a layout is (tiles with the whole picture, rows, columns); rows and columns of tiles.

    Attributes:
        height: Of a tile.
        width: Of the same.
        crop_to_patches: Whether a picture is cut into tiles.
        min_patches: Fewest tiles, the whole picture not counted.
        max_patches: Most tiles.
        num_tile_vectors: Vectors of each.
    """

    name: ClassVar[str] = "GotOcr2ImageProcessor"
    options: ClassVar[tuple[str, ...]] = ("crop_to_patches", "min_patches", "max_patches")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}

    height: int
    width: int
    crop_to_patches: bool
    min_patches: int
    max_patches: int
    num_tile_vectors: int
    patch_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_patches <= self.max_patches <= _MAX_PATCHES:
            raise ProcessorConfigError(f"max_patches must be between min_patches and {_MAX_PATCHES}")

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        height, width = fixed_size(files, 384)
        # InternVL's processor cuts, whatever its files say.
        is_intern = str(files.processor.get("processor_class", "InternVLProcessor")) == "InternVLProcessor"
        return cls(
            **cls._common(files.image),
            height=height,
            width=width,
            crop_to_patches=is_intern or boolean(files.image, "crop_to_patches", False),
            min_patches=integer(files.image, "min_patches", 1),
            max_patches=integer(files.image, "max_patches", 12),
            num_tile_vectors=integer(files.processor, "image_seq_length", 256),
            patch_size=files.encoder_patch_size(),
            begin_token=files.token("start_image_token", "<img>"),
            token=files.token("context_image_token", "<IMG_CONTEXT>"),
            end_token=files.token("end_image_token", "</img>"),
        )

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(*self._tiles(height, width))

    def largest(self) -> ImageLayout:
        return self._layout(1, self.max_patches if self.crop_to_patches else 1)

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        rows, columns = self._tiles(*pixels.shape[:2])
        whole = self._resized(pixels, self.height, self.width)
        if rows * columns == 1:
            return channels_first([whole])
        resized = self._resized(pixels, rows * self.height, columns * self.width)
        return channels_first([*cut(resized, self.height, self.width), whole])

    def _with_low_detail(self) -> Self:
        return replace(self, crop_to_patches=False)

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        count = rows * columns + 1 if rows * columns > 1 else 1
        num_units = count * (self.height // self.patch_size) * (self.width // self.patch_size)
        shape = (count, 3, self.height, self.width)
        return ImageLayout(shape, (count, rows, columns), num_units, count * self.num_tile_vectors)

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns whose ratio is nearest to the picture's; of equal ones, more of them for a large picture."""
        if not self.crop_to_patches or self.max_patches == 1:
            return 1, 1
        ratio, area = width / height, width * height
        best, best_difference = (1, 1), math.inf
        for columns, rows in _arrangements(self.min_patches, self.max_patches):
            difference = abs(ratio - columns / rows)
            is_filled = area > 0.5 * self.height * self.width * columns * rows
            if difference < best_difference or (difference == best_difference and is_filled):
                best, best_difference = (rows, columns), difference
        return best


@dataclass(frozen=True, kw_only=True)
class AyaVisionImageProcessor(GotOcr2ImageProcessor):
    """Aya Vision's, whose tiles are numbered in the prompt.

    Attributes:
        template_token: What a chat template prints.
        tile_token: Before the number of a tile.
        whole_token: Before the whole picture.
    """

    template_token: str
    tile_token: str
    whole_token: str

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        height, width = fixed_size(files, 384)
        values = files.processor
        per_vector = integer(values, "patch_size", 28) * integer(values, "downsample_factor", 1)
        return cls(
            **cls._common(files.image),
            height=height,
            width=width,
            crop_to_patches=True,  # its processor cuts, whatever its files say
            min_patches=integer(files.image, "min_patches", 1),
            max_patches=integer(files.image, "max_patches", 12),
            num_tile_vectors=(integer(values, "img_size", 364) // per_vector) ** 2,
            patch_size=files.encoder_patch_size(),
            begin_token=files.token("start_of_img_token", "<|START_OF_IMG|>"),
            token=files.token("img_patch_token", "<|IMG_PATCH|>"),
            end_token=files.token("end_of_img_token", "<|END_OF_IMG|>"),
            template_token=files.token("image_token", "<image>"),
            tile_token=files.token("tile_token", "TILE"),
            whole_token=files.token("tile_global_token", "TILE_GLOBAL"),
        )

    @property
    def placeholder(self) -> str:
        return self.template_token

    def placeholders(self, layout: ImageLayout) -> tuple[Piece, ...]:
        names = [*(f"{self.tile_token}_{number}" for number in range(1, layout.grid[0])), self.whole_token]
        names[0] = self.begin_token + names[0]
        tiles = (part for name in names for part in (Piece(name), Piece(self.token, self.num_tile_vectors)))
        return (*tiles, Piece(self.end_token))


@lru_cache(maxsize=64)
def _arrangements(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Columns and rows with so many tiles, fewer tiles first."""
    every = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return tuple(sorted((one for one in every if one[0] * one[1] >= fewest), key=lambda one: one[0] * one[1]))
