"""Qwen2-VL, 2.5 and 3: a picture in its own shape, as patches to be merged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError, invalid_image
from llmstack_media.processors.config_values import MAX_SIDE, CheckpointFiles, checked_integer, integer, size_of
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    MAX_RESIZED_PIXELS,
    ImageProcessor,
    check_resized,
)

_MAX_RATIO = 200
_LOW_PIXELS = 512 * 512
BEGIN, END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, kw_only=True)
class Qwen2VLImageProcessor(ImageProcessor):
    """The grid of a layout is (1, rows, columns) of patches before merging.

    An array has the shape [patches, 3, 1, patch_size, patch_size]. The encoder reads `temporal_patch_size` equal
    frames, of which one is kept. Patches that are merged follow one another.

    Attributes:
        min_pixels: Of a resized picture.
        max_pixels: Of the same.
        merge_size: Patches per side that become one vector.
    """

    name: ClassVar[str] = "Qwen2VLImageProcessor"
    has_grid_positions: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}

    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    def __post_init__(self) -> None:
        if not self.min_pixels <= self.max_pixels <= MAX_RESIZED_PIXELS:
            raise ProcessorConfigError(
                f"max_pixels must be between min_pixels ({self.min_pixels}) and {MAX_RESIZED_PIXELS}"
            )

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        image = files.image
        default = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        size = size_of(image.get("size"), "size", default, is_square=False)
        size["shortest_edge"] = integer(image, "min_pixels", size.get("shortest_edge", 0), 1, MAX_SIDE**2)
        size["longest_edge"] = integer(image, "max_pixels", size.get("longest_edge", 0), 1, MAX_SIDE**2)
        return cls(
            **cls._common(files.image),
            min_pixels=checked_integer("size.shortest_edge", size["shortest_edge"], 1, MAX_SIDE**2),
            max_pixels=checked_integer("size.longest_edge", size["longest_edge"], 1, MAX_SIDE**2),
            patch_size=integer(image, "patch_size", 14, 1, MAX_SIDE),
            temporal_patch_size=integer(image, "temporal_patch_size", 2, 1, 64),
            merge_size=integer(image, "merge_size", 2, 1, 64),
            token=files.token("image_token", "<|image_pad|>"),
            around=(BEGIN, END),
        )

    @property
    def factor(self) -> int:
        """Pixels per side of what becomes one vector."""
        return self.patch_size * self.merge_size

    def layout(self, width: int, height: int) -> ImageLayout:
        new_height, new_width = self._size(height, width)
        return self._layout(new_height // self.patch_size, new_width // self.patch_size)

    def largest(self) -> ImageLayout:
        # Of extreme shapes a side of one patch takes more than its share.
        factor = self.factor
        enlarged = [math.sqrt(self.min_pixels * ratio) / factor + 1 for ratio in (_MAX_RATIO, 1 / _MAX_RATIO)]
        most_columns = max(
            self.max_pixels // factor**2,
            int(math.sqrt(_MAX_RATIO * self.max_pixels) / factor),
            math.ceil(self.min_pixels / factor**2 + sum(enlarged)),
        )
        return self._layout(self.merge_size, self.merge_size * most_columns)

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        resized = self._resized(pixels, *self._size(*pixels.shape[:2]))
        return cut_patches(resized[None], 1, self.patch_size, self.merge_size)

    def _with_low_detail(self) -> Self:
        return replace(self, max_pixels=max(self.min_pixels, min(self.max_pixels, _LOW_PIXELS)))

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        num_patches = rows * columns
        shape = (num_patches, 3, 1, self.patch_size, self.patch_size)
        return ImageLayout(shape, (1, rows, columns), num_patches, num_patches // self.merge_size**2)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Multiples of `factor` near the picture's shape, with a number of pixels within the bounds."""
        return fit_sides((height, width), self.factor, self.min_pixels, self.max_pixels)


def fit_sides(
    sides: tuple[int, int], factor: int, min_pixels: int, max_pixels: int, frames: tuple[int, int] = (1, 1)
) -> tuple[int, int]:
    """Multiples of `factor` near the height and width, so that the pixels of all frames are within the bounds.

    `frames`: How many there are, and how many are counted at first, as in the reference.

    Raises:
        InvalidRequestError: One side is too long or too short for the other, or the result is too large.
    """
    if max(sides) > _MAX_RATIO * min(sides):
        raise invalid_image(f"has a side that is more than {_MAX_RATIO} times the other")
    height, width = (round(side / factor) * factor for side in sides)
    area = frames[0] * sides[0] * sides[1]
    if frames[1] * height * width > max_pixels:
        scale = math.sqrt(area / max_pixels)
        height, width = (max(factor, math.floor(side / scale / factor) * factor) for side in sides)
    elif frames[1] * height * width < min_pixels:
        scale = math.sqrt(min_pixels / area)
        height, width = (math.ceil(side * scale / factor) * factor for side in sides)
    if not height or not width:
        raise invalid_image("has a side that is too short for this model")
    return check_resized(height, width)


def cut_patches(frames: NDArray[np.uint8], num_frames: int, side: int, merge: int) -> NDArray[np.uint8]:
    """Patches [patches, 3, num_frames, side, side] of frames [frames, height, width, 3], a multiple of `num_frames`.

    Those that are merged, `merge` in each direction, follow one another.
    """
    times, rows, columns = len(frames) // num_frames, frames.shape[1] // side, frames.shape[2] // side
    parts = frames.reshape(times, num_frames, rows // merge, merge, side, columns // merge, merge, side, 3)
    # Times, rows, columns, row and column within, channel, frame, y, x.
    patches = parts.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(patches).reshape(times * rows * columns, 3, num_frames, side, side)
