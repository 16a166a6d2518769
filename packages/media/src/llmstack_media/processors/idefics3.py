"""Idefics3 and SmolVLM: a picture in square crops, and whole in one more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import (
    MAX_SIDE,
    CheckpointFiles,
    boolean,
    checked_integer,
    integer,
    size_of,
)
from llmstack_media.processors.layout import ImageLayout, Piece
from llmstack_media.processors.processor import (
    HALF,
    LANCZOS,
    ImageProcessor,
    channels_first,
    check_resized,
    cut,
    inert_but,
)

_MAX_SIDE = 4096
"""No side is longer after the first resize, whatever the checkpoint says."""
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, kw_only=True)
class Idefics3ImageProcessor(ImageProcessor):
    """Crops of `crop_size` squared. The grid of a layout is (crops, rows, columns), rows and columns 0 without cuts.

    Attributes:
        longest_edge: To which the picture is resized first.
        crop_size: Side of a crop.
        do_image_splitting: Whether it is cut; otherwise it becomes one crop.
        num_crop_vectors: Vectors of a crop.
        patch_size: Side of the encoder's patches.
    """

    name: ClassVar[str] = "Idefics3ImageProcessor"
    options: ClassVar[tuple[str, ...]] = ("do_image_splitting", "longest_edge")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": LANCZOS, "image_mean": HALF, "image_std": HALF}
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = inert_but("do_pad")

    longest_edge: int
    crop_size: int
    do_image_splitting: bool
    num_crop_vectors: int
    patch_size: int

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        image = files.image
        size = size_of(image.get("size"), "size", {"longest_edge": 4 * 364}, is_square=True)
        crop = size_of(image.get("max_image_size"), "max_image_size", {"longest_edge": 364}, is_square=True)
        if set(size) != {"longest_edge"} or set(crop) != {"longest_edge"}:
            raise ProcessorConfigError("size and max_image_size must have the key longest_edge")
        return cls(
            **cls._common(files.image),
            longest_edge=checked_integer("size.longest_edge", size["longest_edge"], 1, MAX_SIDE),
            crop_size=checked_integer("max_image_size.longest_edge", crop["longest_edge"], 1, _MAX_SIDE),
            do_image_splitting=boolean(image, "do_image_splitting", True),
            num_crop_vectors=integer(files.processor, "image_seq_len", 169),
            patch_size=files.encoder_patch_size(),
            token=files.token("image_token", "<image>"),
        )

    def layout(self, width: int, height: int) -> ImageLayout:
        rows, columns = self._cuts(*self._final_size(height, width))
        return self._layout(rows, columns)

    def largest(self) -> ImageLayout:
        side = math.ceil(min(self.longest_edge, _MAX_SIDE) / self.crop_size)
        return self._layout(side, side) if self.do_image_splitting and side > 1 else self._layout(0, 0)

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        height, width = pixels.shape[:2]
        pixels = self._resized(pixels, *self._first_size(height, width))
        side = self.crop_size
        if not self.do_image_splitting:
            return channels_first([self._resized(pixels, side, side)])
        height, width = self._final_size(height, width)
        pixels = self._resized(pixels, height, width)
        crops = cut(pixels, side, side) if self._cuts(height, width)[0] else []
        return channels_first([*crops, self._resized(pixels, side, side) if crops else pixels])

    def placeholders(self, layout: ImageLayout) -> tuple[Piece, ...]:
        _, rows, columns = layout.grid
        crop = Piece(self.token, self.num_crop_vectors)
        pieces: list[Piece] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                begin = "\n" if row > 1 and column == 1 else ""
                pieces += [Piece(f"{begin}{_AROUND}<row_{row}_col_{column}>"), crop]
        begin = "\n\n" if rows else ""
        return (*pieces, Piece(f"{begin}{_AROUND}{_WHOLE}"), crop, Piece(_AROUND))

    def _with_low_detail(self) -> Self:
        return replace(self, do_image_splitting=False)

    def _layout(self, rows: int, columns: int) -> ImageLayout:
        num_crops = rows * columns + 1
        num_units = num_crops * (self.crop_size // self.patch_size) ** 2
        shape = (num_crops, 3, self.crop_size, self.crop_size)
        return ImageLayout(shape, (num_crops, rows, columns), num_units, num_crops * self.num_crop_vectors)

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        """The longest edge as the checkpoint says, the other one even, then both at most `_MAX_SIDE`."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > _MAX_SIDE:
            width = _MAX_SIDE
            height = int(width / ratio)
        elif height > width and height > _MAX_SIDE:
            height = _MAX_SIDE
            width = int(height * ratio)
        return max(height, 1), max(width, 1)

    def _final_size(self, height: int, width: int) -> tuple[int, int]:
        """Multiples of a crop's side; one crop where nothing is cut."""
        side = self.crop_size
        if not self.do_image_splitting:
            return side, side
        height, width = self._first_size(height, width)
        ratio = width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        return check_resized(height, width)

    def _cuts(self, height: int, width: int) -> tuple[int, int]:
        side = self.crop_size
        return (height // side, width // side) if height > side or width > side else (0, 0)


class SmolVLMImageProcessor(Idefics3ImageProcessor):
    """Idefics3's processor under the name of SmolVLM."""

    name: ClassVar[str] = "SmolVLMImageProcessor"
