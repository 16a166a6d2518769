"""Gemma 4: a picture in its own shape, with nearly the same number of vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import MAX_SIDE, CheckpointFiles, integer
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.processor import BICUBIC, ImageProcessor, channels_first

_BUDGETS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True, kw_only=True)
class Gemma4ImageProcessor(ImageProcessor):
    """The grid of a layout is (1, rows, columns) of patches before they are pooled.

    Attributes:
        max_soft_tokens: The most vectors of a picture, which is made larger or smaller to have nearly as many.
        patch_size: Side of the encoder's patches.
        pooling_kernel_size: Patches per side that become one vector.
    """

    name: ClassVar[str] = "Gemma4ImageProcessor"
    options: ClassVar[tuple[str, ...]] = ("max_soft_tokens",)
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "resample": BICUBIC, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0),
    }  # fmt: skip

    max_soft_tokens: int
    patch_size: int
    pooling_kernel_size: int

    def __post_init__(self) -> None:
        if self.max_soft_tokens not in _BUDGETS:
            raise ProcessorConfigError(f"max_soft_tokens must be one of {', '.join(map(str, _BUDGETS))}")

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        return cls(
            **cls._common({"do_normalize": False, **files.image}),
            max_soft_tokens=integer(files.image, "max_soft_tokens", 280),
            patch_size=integer(files.image, "patch_size", 16, 1, MAX_SIDE),
            pooling_kernel_size=integer(files.image, "pooling_kernel_size", 3, 1, MAX_SIDE),
            begin_token=files.token("boi_token", "<|image>"),
            token=files.token("image_token", "<|image|>"),
            end_token=files.token("eoi_token", "<image|>"),
        )

    def layout(self, width: int, height: int) -> ImageLayout:
        return self._layout(*self._size(height, width))

    def largest(self) -> ImageLayout:
        return self._layout(self._side, self._side * self.max_soft_tokens)

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        return channels_first([self._resized(pixels, *self._size(*pixels.shape[:2]))])

    def _with_low_detail(self) -> Self:
        return replace(self, max_soft_tokens=_BUDGETS[0])

    @property
    def _side(self) -> int:
        """The side of the square of one vector, in pixels."""
        return self.patch_size * self.pooling_kernel_size

    def _layout(self, height: int, width: int) -> ImageLayout:
        rows, columns = height // self.patch_size, width // self.patch_size
        num_vectors = (height // self._side) * (width // self._side)
        return ImageLayout((1, 3, height, width), (1, rows, columns), rows * columns, num_vectors)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """The largest one of nearly this shape in whole vectors, of which there are at most `max_soft_tokens`."""
        side, most = self._side, self.max_soft_tokens
        factor = math.sqrt(most * side**2 / (height * width))
        rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return rows * side, columns * side
