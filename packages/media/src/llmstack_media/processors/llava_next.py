"""LLaVA-NeXT: a picture in the grid of tiles that suits it best, and whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import MAX_SIDE, CheckpointFiles, checked_integer, integer, size_of
from llmstack_media.processors.fixed_size import additional_vectors
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ImageProcessor,
    channels_first,
    cut,
    inert_but,
)

_DEFAULT_GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_MAX_GRIDS = 256


@dataclass(frozen=True, kw_only=True)
class LlavaNextImageProcessor(ImageProcessor):
    """The grid of a layout is (tiles with the whole picture, height and width of the original picture).

    Attributes:
        side: Of a tile, in pixels.
        grids: Heights and widths, in pixels, in which a picture may be cut.
        num_additional: Vectors beside those of patches, of the whole picture.
    """

    name: ClassVar[str] = "LlavaNextImageProcessor"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = inert_but("do_center_crop", "do_pad")

    side: int
    grids: tuple[tuple[int, int], ...]
    patch_size: int
    num_additional: int

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        image = files.image
        size = size_of(image.get("size"), "size", {"shortest_edge": 224}, is_square=False)
        crop = size_of(image.get("crop_size"), "crop_size", {"height": 224, "width": 224}, is_square=True)
        sides = set(size.values()) | set(crop.values())
        if len(sides) != 1 or set(size) not in ({"shortest_edge"}, {"height", "width"}):
            raise ProcessorConfigError("size and crop_size must be one and the same square")
        side = checked_integer("size", sides.pop(), 1, MAX_SIDE)
        return cls(
            **cls._common(files.image),
            side=side,
            grids=grids_of(image.get("image_grid_pinpoints") or _DEFAULT_GRIDS, side),
            patch_size=integer(files.processor, "patch_size", 0, 0, MAX_SIDE) or files.encoder_patch_size(),
            num_additional=additional_vectors(files),
            token=files.token("image_token", "<image>"),
        )

    def layout(self, width: int, height: int) -> ImageLayout:
        best_height, best_width = self.best_grid(height, width)
        num_tiles = (best_height // self.side) * (best_width // self.side) + 1
        num_units = num_tiles * (self.side // self.patch_size) ** 2
        shape = (num_tiles, 3, self.side, self.side)
        return ImageLayout(shape, (num_tiles, height, width), num_units, self._num_vectors(height, width))

    def largest(self) -> ImageLayout:
        return max((self.layout(width, height) for height, width in self.grids), key=lambda one: one.num_vectors)

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        height, width = pixels.shape[:2]
        best_height, best_width = self.best_grid(height, width)
        new_height, new_width = _size_within(height, width, best_height, best_width)
        canvas = np.zeros((best_height, best_width, 3), dtype=np.uint8)
        top, left = (best_height - new_height) // 2, (best_width - new_width) // 2
        canvas[top : top + new_height, left : left + new_width] = self._resized(pixels, new_height, new_width)
        side = self.side
        return channels_first([self._resized(pixels, side, side), *cut(canvas, side, side)])

    def _num_vectors(self, height: int, width: int) -> int:
        """Vectors of the whole picture, of its tiles without their borders, and one at the end of each row."""
        per_side = self.side // self.patch_size
        best_height, best_width = self.best_grid(height, width)
        top, left = self.borders(height, width)
        rows, columns = (per_side * (length // self.side) for length in (best_height, best_width))
        rows, columns = rows - 2 * top, columns - 2 * left
        return rows * columns + rows + per_side**2 + self.num_additional

    def borders(self, height: int, width: int) -> tuple[int, int]:
        """Rows of patches above and below a picture of this size in its grid, and columns left and right of it."""
        per_side = self.side // self.patch_size
        rows, columns = (per_side * (length // self.side) for length in self.best_grid(height, width))
        if width / height > columns / rows:
            return (rows - int(round(height * (columns / width), 7))) // 2, 0
        return 0, (columns - int(round(width * (rows / height), 7))) // 2

    def best_grid(self, height: int, width: int) -> tuple[int, int]:
        """The grid that keeps most pixels of a picture; of equal ones, that with the smallest borders."""
        best, best_kept, best_wasted = self.grids[0], 0, math.inf
        for grid in self.grids:
            scale = min(grid[1] / width, grid[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            wasted = grid[0] * grid[1] - kept
            if kept > best_kept or (kept == best_kept and wasted < best_wasted):
                best, best_kept, best_wasted = grid, kept, wasted
        return best


def _size_within(height: int, width: int, max_height: int, max_width: int) -> tuple[int, int]:
    by_width, by_height = max_width / width, max_height / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), max_height), max_width
    return max_height, min(math.ceil(width * by_height), max_width)


def grids_of(value: object, side: int) -> tuple[tuple[int, int], ...]:
    """Heights and widths in which a picture may be cut into tiles of this side.

    Raises:
        ProcessorConfigError: They are something else.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_GRIDS:
        raise ProcessorConfigError("image_grid_pinpoints must be a list of heights and widths")
    grids = []
    for one in value:
        if not isinstance(one, list) or len(one) != 2:
            raise ProcessorConfigError("image_grid_pinpoints must be a list of heights and widths")
        grid = [checked_integer("image_grid_pinpoints", length, side, MAX_SIDE) for length in one]
        if grid[0] % side or grid[1] % side:
            raise ProcessorConfigError(f"image_grid_pinpoints must be multiples of {side}")
        grids.append((grid[0], grid[1]))
    return tuple(grids)
