"""Gemma 3: a picture in one size; with pan and scan, crops of a long one as well."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.processors.config_values import MAX_SIDE, CheckpointFiles, boolean, integer, number
from llmstack_media.processors.fixed_size import fixed_size
from llmstack_media.processors.layout import ImageLayout, Piece
from llmstack_media.processors.processor import BILINEAR, HALF, ImageProcessor, channels_first

_MAX_CROPS = 256


@dataclass(frozen=True, kw_only=True)
class Gemma3ImageProcessor(ImageProcessor):
    """The grid of a layout is (pictures, rows, columns): the whole one and its crops, and patches of each.

    Attributes:
        do_pan_and_scan: Whether long pictures are shown in crops too.
        pan_and_scan_min_crop_size: In pixels of the original picture.
        pan_and_scan_min_ratio_to_activate: Of the longer to the shorter side.
        num_crop_vectors: Vectors of each.
    """

    name: ClassVar[str] = "Gemma3ImageProcessor"
    options: ClassVar[tuple[str, ...]] = (
        "do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    )  # fmt: skip
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BILINEAR, "image_mean": HALF, "image_std": HALF}

    height: int
    width: int
    do_pan_and_scan: bool
    pan_and_scan_min_crop_size: int
    pan_and_scan_max_num_crops: int
    pan_and_scan_min_ratio_to_activate: float
    num_crop_vectors: int
    patch_size: int

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        image = files.image
        height, width = fixed_size(files, 224)
        return cls(
            **cls._common(files.image),
            height=height,
            width=width,
            do_pan_and_scan=boolean(image, "do_pan_and_scan", False),
            pan_and_scan_min_crop_size=integer(image, "pan_and_scan_min_crop_size", 256, 1, MAX_SIDE),
            pan_and_scan_max_num_crops=integer(image, "pan_and_scan_max_num_crops", 4, 1, _MAX_CROPS),
            pan_and_scan_min_ratio_to_activate=number(image, "pan_and_scan_min_ratio_to_activate", 1.2),
            num_crop_vectors=integer(files.processor, "image_seq_length", 256),
            patch_size=files.encoder_patch_size(),
            begin_token=files.token("boi_token", "<start_of_image>"),
            token=files.token("image_token", "<image_soft_token>"),
            end_token=files.token("eoi_token", "<end_of_image>"),
        )

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(len(self._crops(height, width)))

    def largest(self) -> ImageLayout:
        return self._layout(max(2, self.pan_and_scan_max_num_crops) if self.do_pan_and_scan else 0)

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        crops = [pixels[rows, columns] for rows, columns in self._crops(*pixels.shape[:2])]
        return channels_first([self._resized(one, self.height, self.width) for one in (pixels, *crops)])

    @property
    def placeholder(self) -> str:
        return self.begin_token

    def placeholders(self, layout: ImageLayout) -> tuple[Piece, ...]:
        begin, end = f"\n\n{self.begin_token}", f"{self.end_token}\n\n"
        vectors = Piece(self.token, self.num_crop_vectors)
        if layout.grid[0] == 1:
            return (Piece(begin), vectors, Piece(end))
        between = f"{end} and here are some crops to help you see better {begin}"
        pieces = [Piece(f"Here is the original image {begin}"), vectors, Piece(between), vectors]
        for _ in range(layout.grid[0] - 2):
            pieces += [Piece(f"{end} {begin}"), vectors]
        return (*pieces, Piece(end))

    def _with_low_detail(self) -> Self:
        return replace(self, do_pan_and_scan=False)

    def _layout(self, num_crops: int) -> ImageLayout:
        rows, columns = self.height // self.patch_size, self.width // self.patch_size
        count = num_crops + 1
        shape = (count, 3, self.height, self.width)
        return ImageLayout(shape, (count, rows, columns), count * rows * columns, count * self.num_crop_vectors)

    def _crops(self, height: int, width: int) -> list[tuple[slice, slice]]:
        """Rows and columns of each crop of a picture that is long enough."""
        longer, shorter = max(height, width), min(height, width)
        if not self.do_pan_and_scan or longer / shorter < self.pan_and_scan_min_ratio_to_activate:
            return []
        smallest = self.pan_and_scan_min_crop_size
        num_crops = max(2, min(longer // smallest, math.floor(longer / shorter + 0.5)))
        num_crops = min(self.pan_and_scan_max_num_crops, num_crops)
        length = math.ceil(longer / num_crops)
        if min(length, shorter) < smallest:
            return []
        parts = [slice(length * index, length * (index + 1)) for index in range(num_crops)]
        whole = slice(0, shorter)
        return [(whole, part) for part in parts] if width >= height else [(part, whole) for part in parts]
