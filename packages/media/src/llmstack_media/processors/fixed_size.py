"""SigLIP, CLIP and LLaVA: every picture becomes one of the same size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import MAX_SIDE, CheckpointFiles, boolean, integer, size_of
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.processor import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ImageProcessor,
    channels_first,
    check_resized,
    inert_but,
)


@dataclass(frozen=True, kw_only=True)
class FixedSizeProcessor(ImageProcessor):
    """One crop of a fixed size. The grid of a layout is (1, rows, columns) of patches.

    Attributes:
        height: Of what the encoder reads.
        width: Of the same.
        shortest_edge: To which a picture is resized before its middle is cut out; 0 where it is resized to the size
            itself, whatever its shape.
        has_square_padding: Whether it is made square first, by borders of the mean colour.
        patch_size: Side of the encoder's patches.
        num_vectors: Vectors of a picture.
    """

    height: int
    width: int
    shortest_edge: int
    has_square_padding: bool
    patch_size: int
    num_vectors: int

    def layout(self, width: int, height: int) -> ImageLayout:
        if self.has_square_padding:
            check_resized(max(height, width), max(height, width))
        elif self.shortest_edge:
            check_resized(*self._first_size(height, width))
        return self.largest()

    def largest(self) -> ImageLayout:
        rows, columns = self.height // self.patch_size, self.width // self.patch_size
        return ImageLayout((1, 3, self.height, self.width), (1, rows, columns), rows * columns, self.num_vectors)

    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        if self.has_square_padding:
            pixels = self._padded(pixels)
        if not self.shortest_edge:
            return channels_first([self._resized(pixels, self.height, self.width)])
        resized = self._resized(pixels, *self._first_size(*pixels.shape[:2]))
        return channels_first([middle_of(resized, self.height, self.width)])

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        return size_by_shortest_edge(height, width, self.shortest_edge)

    def _padded(self, pixels: Pixels) -> Pixels:
        height, width = pixels.shape[:2]
        side = max(height, width)
        padded = np.empty((side, side, 3), dtype=np.uint8)
        padded[:] = [int(mean * 255) for mean in self.image_mean]
        top, left = (side - height) // 2, (side - width) // 2
        padded[top : top + height, left : left + width] = pixels
        return padded


class SiglipImageProcessor(FixedSizeProcessor):
    """SigLIP's: resized to one size whatever the shape of a picture is."""

    name: ClassVar[str] = "SiglipImageProcessor"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": HALF, "image_std": HALF}

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        height, width = fixed_size(files, 224)
        patch_size = files.encoder_patch_size()
        return cls(
            **cls._common(files.image), height=height, width=width, shortest_edge=0, has_square_padding=False,
            patch_size=patch_size, num_vectors=(height // patch_size) * (width // patch_size) + cls._additional(files),
            token=files.token("image_token", "<image>"),
        )  # fmt: skip

    @classmethod
    def _additional(cls, files: CheckpointFiles) -> int:
        """The class token of LLaVA's encoder; only LLaVA's processor has its fields."""
        return additional_vectors(files) if "vision_feature_select_strategy" in files.processor else 0


class CLIPImageProcessor(FixedSizeProcessor):
    """CLIP's, as LLaVA uses it: resized by the shortest edge, and the middle cut out."""

    name: ClassVar[str] = "CLIPImageProcessor"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = inert_but("do_center_crop")

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        image = files.image
        size = size_of(image.get("size"), "size", {"shortest_edge": 224}, is_square=False)
        crop = size_of(image.get("crop_size"), "crop_size", {"height": 224, "width": 224}, is_square=True)
        if set(crop) != {"height", "width"} or set(size) not in ({"shortest_edge"}, {"height", "width"}):
            raise ProcessorConfigError("size must have shortest_edge or height and width, and crop_size these two")
        has_crop = boolean(image, "do_center_crop", True)
        is_direct = "shortest_edge" not in size
        if (not has_crop and not is_direct) or (has_crop and is_direct and size != crop):
            raise ProcessorConfigError(
                "without do_center_crop, size must have height and width; with it, shortest_edge"
            )
        height, width = _height_and_width(size if is_direct else crop)
        patch_size = integer(files.processor, "patch_size", 0, 0, MAX_SIDE) or files.encoder_patch_size()
        return cls(
            **cls._common(files.image), height=height, width=width, shortest_edge=size.get("shortest_edge", 0),
            has_square_padding=cls._has_square_padding(files), patch_size=patch_size,
            num_vectors=(height // patch_size) * (width // patch_size) + additional_vectors(files),
            token=files.token("image_token", "<image>"),
        )  # fmt: skip

    @classmethod
    def _has_square_padding(cls, files: CheckpointFiles) -> bool:
        return False


class LlavaImageProcessor(CLIPImageProcessor):
    """LLaVA's own, which may make a picture square by borders first."""

    name: ClassVar[str] = "LlavaImageProcessor"
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = inert_but("do_center_crop", "do_pad")

    @classmethod
    def _has_square_padding(cls, files: CheckpointFiles) -> bool:
        return boolean(files.image, "do_pad", False)


def fixed_size(files: CheckpointFiles, default: int, options: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """Height and width that `size` says. `options`: Where it is, if not among those for pictures.

    Raises:
        ProcessorConfigError: It says something else.
    """
    values = files.image if options is None else options
    size = size_of(values.get("size"), "size", {"height": default, "width": default}, is_square=True)
    if set(size) != {"height", "width"}:
        raise ProcessorConfigError("size must have the keys height and width")
    return _height_and_width(size)


def _height_and_width(size: dict[str, int]) -> tuple[int, int]:
    if max(size.values()) > MAX_SIDE:
        raise ProcessorConfigError(f"size must be at most {MAX_SIDE}")
    return size["height"], size["width"]


def additional_vectors(files: CheckpointFiles) -> int:
    """Vectors beside those of patches: the encoder's class token, unless the model leaves it out."""
    is_default = bool(files.processor.get("vision_feature_select_strategy", "default") == "default")
    return integer(files.processor, "num_additional_image_tokens", 0, 0, 64) - is_default


def size_by_shortest_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Height and width with the same ratio, the shorter one as given."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def middle_of(pixels: Pixels, height: int, width: int) -> Pixels:
    """The middle of a picture; where it is smaller, with black borders."""
    old_height, old_width = pixels.shape[:2]
    top, left = (old_height - height) // 2, (old_width - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + height, left : left + width]
    canvas = np.zeros((max(height, old_height), max(width, old_width), 3), dtype=np.uint8)
    pad_top, pad_left = -(-(canvas.shape[0] - old_height) // 2), -(-(canvas.shape[1] - old_width) // 2)
    canvas[pad_top : pad_top + old_height, pad_left : pad_left + old_width] = pixels
    top, left = top + pad_top, left + pad_left
    return canvas[max(0, top) : top + height, max(0, left) : left + width]
