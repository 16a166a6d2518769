"""Pixtral, Mistral 3, LightOnOCR: a picture in its own shape, in rows of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import MAX_SIDE, CheckpointFiles, checked_integer, integer, size_of
from llmstack_media.processors.layout import ImageLayout, Piece
from llmstack_media.processors.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ImageProcessor,
    channels_first,
    check_resized,
    inert_but,
)

_LOW_EDGE = 512


@dataclass(frozen=True, kw_only=True)
class PixtralImageProcessor(ImageProcessor):
    """The grid of a layout is (1, rows, columns) of patches before merging.

    Attributes:
        max_height: Of a picture; a larger one is made smaller, a smaller one keeps its size.
        max_width: Of the same.
        patch_size: Side of the encoder's patches.
        merge_size: Patches per side that become one vector.
        side: Of which height and width of a prepared picture are multiples.
    """

    name: ClassVar[str] = "PixtralImageProcessor"
    options: ClassVar[tuple[str, ...]] = ("max_height", "max_width")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = inert_but("do_pad")

    DEFAULT_MERGE_SIZE: ClassVar[int] = 1

    max_height: int
    max_width: int
    patch_size: int
    merge_size: int
    side: int
    break_token: str

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        size = size_of(files.image.get("size"), "size", {"longest_edge": 1024}, is_square=True)
        if set(size) not in ({"longest_edge"}, {"height", "width"}):
            raise ProcessorConfigError("size must have longest_edge, or height and width")
        found = files.processor.get("spatial_merge_size") or files.model.get("spatial_merge_size")
        patch_size = integer(files.processor, "patch_size", 0, 0, MAX_SIDE) or files.encoder_patch_size()
        merge_size = checked_integer("spatial_merge_size", found or cls.DEFAULT_MERGE_SIZE, 1, MAX_SIDE)
        return cls(
            **cls._common(files.image),
            max_height=checked_integer("size", size.get("height") or size["longest_edge"], 1, MAX_SIDE),
            max_width=checked_integer("size", size.get("width") or size["longest_edge"], 1, MAX_SIDE),
            patch_size=patch_size,
            merge_size=merge_size,
            side=cls._side(files, patch_size, merge_size),
            token=files.token("image_token", "[IMG]"),
            break_token=files.token("image_break_token", "[IMG_BREAK]"),
            end_token=files.token("image_end_token", "[IMG_END]"),
        )

    @classmethod
    def _side(cls, files: CheckpointFiles, patch_size: int, merge_size: int) -> int:
        """The side in the call of the image processor by the reference's processor."""
        return patch_size * merge_size

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(*self._size(height, width))

    def largest(self) -> ImageLayout:
        return self._layout(*self._size(self.max_height, self.max_width))

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        return channels_first([self._resized(pixels, *self._size(*pixels.shape[:2]))])

    def placeholders(self, layout: ImageLayout) -> tuple[Piece, ...]:
        rows, columns = layout.grid[1] // self.merge_size, layout.grid[2] // self.merge_size
        row = (Piece(self.token, columns), Piece(self.break_token))
        return (*(row * rows)[:-1], Piece(self.end_token))

    def _with_low_detail(self) -> Self:
        return replace(self, max_height=min(self.max_height, _LOW_EDGE), max_width=min(self.max_width, _LOW_EDGE))

    def _layout(self, height: int, width: int) -> ImageLayout:
        rows, columns = height // self.patch_size, width // self.patch_size
        num_vectors = (rows // self.merge_size) * (columns // self.merge_size)
        return ImageLayout((1, 3, height, width), (1, rows, columns), rows * columns, num_vectors)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Within the largest size, in whole patches."""
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        side = self.side
        return check_resized(((height - 1) // side + 1) * side, ((width - 1) // side + 1) * side)


@dataclass(frozen=True, kw_only=True)
class LightOnOcrImageProcessor(PixtralImageProcessor):
    """LightOnOCR's: one run of vectors, without breaks between rows."""

    DEFAULT_MERGE_SIZE: ClassVar[int] = 2

    @classmethod
    def _side(cls, files: CheckpointFiles, patch_size: int, merge_size: int) -> int:
        """The side in its own file, which must be whole vectors."""
        side = size_of(files.image.get("patch_size"), "patch_size", {"height": 16, "width": 16}, is_square=True)
        if len(set(side.values())) != 1 or (found := next(iter(side.values()))) % (patch_size * merge_size):
            raise ProcessorConfigError(f"patch_size must be a multiple of {patch_size * merge_size}")
        return found

    def placeholders(self, layout: ImageLayout) -> tuple[Piece, ...]:
        return (Piece(self.token, layout.num_vectors),)
