"""Base of processors of pictures and videos: resizing, values, options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError, image_too_large, invalid_option, unknown_option
from llmstack_media.processors.config_values import CheckpointFiles, boolean, channels, integer, number, refuse
from llmstack_media.processors.layout import ImageLayout, Piece

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC, LANCZOS = (
    int(one) for one in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
)
INERT: Mapping[str, tuple[object, ...]] = {
    "do_resize": (True,), "do_center_crop": (False,), "do_pad": (False,), "do_convert_rgb": (True,),
}  # fmt: skip
LayoutT = TypeVar("LayoutT", bound=ImageLayout)
MAX_RESIZED_PIXELS = 100_000_000
"""Of a picture between two steps of its preprocessing: an extreme shape may grow before it is cut."""


@dataclass(frozen=True, kw_only=True)
class ItemProcessor(ABC, Generic[LayoutT]):
    """Prepares one kind of items: how they are written in prompts, and what a request may change.

    Attributes:
        token: The special token of each vector in a prompt.
        begin_token: Before the tokens of an item, where the placeholder stands for it too.
        end_token: Behind the tokens of an item, where the placeholder stands for it too.
        around: What a text has before and behind the placeholder, if a template takes texts alone.
    """

    name: ClassVar[str]
    """Of the reference's class, without an ending."""
    has_grid_positions: ClassVar[bool] = False
    """Whether the positions of tokens in the model follow from the grid of an item."""
    options: ClassVar[tuple[str, ...]] = ()
    """Fields that a request may set."""

    token: str
    begin_token: str = ""
    end_token: str = ""
    around: tuple[str, str] = ("", "")

    def placeholders(self, layout: LayoutT) -> tuple[Piece, ...]:
        """The text in place of the item's placeholder: a token for each vector, and the text around them."""
        vectors = Piece(self.token, layout.num_vectors)
        return tuple(one for one in (Piece(self.begin_token), vectors, Piece(self.end_token)) if one.text)

    @abstractmethod
    def largest(self) -> LayoutT:
        """A layout with as many vectors as any item can have, or a few more."""

    @property
    def placeholder(self) -> str:
        """The special token that a chat template prints where an item stands, and that the pieces replace."""
        return self.token

    @property
    def placeholder_in_text(self) -> str:
        """The text where a template takes texts alone: the placeholder, with what surrounds it.

        `{number}` in it is the number of the item among those of its kind, from 1 on.
        """
        return self.placeholder.join(self.around)

    def for_detail(self, detail: str) -> Self:
        """The processor of a request with this `detail`: `low` costs less, others are as the checkpoint says."""
        return self._with_low_detail() if detail == "low" else self

    def _with_low_detail(self) -> Self:
        return self

    def with_options(self, options: Mapping[str, object]) -> Self:
        """The processor with options of a request, which may lower the cost of an item and not raise it.

        Raises:
            InvalidRequestError: An option is unknown, has a wrong value, or makes items larger than the server's.
        """
        for name in options:
            if name not in self.options:
                raise unknown_option(name, sorted(self.options))
        changed = self._changed(options)
        largest = self.largest().num_vectors
        if changed.largest().num_vectors > largest:
            raise invalid_option(" and ".join(options), f"such that an item has at most {largest} vectors")
        return changed

    def _changed(self, options: Mapping[str, object]) -> Self:
        for name, value in options.items():
            kind = type(getattr(self, name))
            if kind is bool and not isinstance(value, bool):
                raise invalid_option(name, "true or false")
            if kind is not bool and (isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0):
                raise invalid_option(name, "a positive number" if kind is float else "a positive integer")
        changes: dict[str, Any] = {**options}
        try:
            return replace(self, **changes)
        except ProcessorConfigError as error:
            raise invalid_option(" and ".join(options), str(error).partition("must be ")[2] or "possible") from error

    def identity(self) -> tuple[tuple[str, str], ...]:
        """Name and options in effect: two processors with the same one make the same array of an item."""
        return (("name", self.name), *((one.name, repr(getattr(self, one.name))) for one in fields(self)))


@dataclass(frozen=True, kw_only=True)
class PixelProcessor(ItemProcessor[LayoutT]):
    """Makes arrays out of the bytes of pictures, or of the frames of videos.

    Attributes:
        resample: Pillow's filter.
        do_rescale: Whether values are multiplied by `rescale_factor`.
        do_normalize: Whether the mean is subtracted then, and the rest divided by the standard deviation.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Of the reference's class: resample, image_mean, image_std."""
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = INERT
    """Options of the reference's class that must have these values, where a checkpoint has them."""

    resample: int
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    def value_table(self) -> NDArray[np.float32]:
        """Values of the model for each byte, [3, 256]: the reference's arithmetic, step by step in its types."""
        values = np.arange(256, dtype=np.uint8)[None].repeat(3, axis=0)
        table: NDArray[np.float32] = values.astype(np.float32)
        if self.do_rescale:
            table = (values.astype(np.float64) * self.rescale_factor).astype(np.float32)
        if self.do_normalize:
            mean, std = (np.array(one, dtype=np.float32)[:, None] for one in (self.image_mean, self.image_std))
            table = (table - mean) / std
        return table

    @classmethod
    def _common(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that all families have, out of the options in the files."""
        refuse(values, cls.INERT)
        defaults = cls.DEFAULTS
        return {
            "resample": integer(values, "resample", defaults["resample"], 0, 5),
            "do_rescale": boolean(values, "do_rescale", True),
            "rescale_factor": number(values, "rescale_factor", 1 / 255),
            "do_normalize": boolean(values, "do_normalize", True),
            "image_mean": channels(values, "image_mean", defaults["image_mean"]),
            "image_std": channels(values, "image_std", defaults["image_std"]),
        }

    def _resized(self, pixels: Pixels, height: int, width: int) -> Pixels:
        """The picture in another size, by Pillow's filter."""
        image = Image.fromarray(np.ascontiguousarray(pixels))
        return np.asarray(image.resize((width, height), resample=Image.Resampling(self.resample)))


@dataclass(frozen=True, kw_only=True)
class ImageProcessor(PixelProcessor[ImageLayout]):
    """Preprocessing of one model family, equal to transformers' class of the same name that uses Pillow."""

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        """The processor of a checkpoint.

        Raises:
            ProcessorConfigError: Its files ask for something else than this family does.
        """

    @abstractmethod
    def layout(self, width: int, height: int) -> ImageLayout:
        """The layout of a picture of this size, in pixels as it is shown.

        Raises:
            InvalidRequestError: It cannot become anything.
        """

    @abstractmethod
    def prepare(self, pixels: Pixels) -> NDArray[np.uint8]:
        """The array that the encoder reads, of the layout's shape. `pixels`: [height, width, 3]."""


def inert_but(*names: str) -> Mapping[str, tuple[object, ...]]:
    """The fields of most classes without effect, except these, which a class has itself, or does not read."""
    return {name: values for name, values in INERT.items() if name not in names}


def check_resized(height: int, width: int) -> tuple[int, int]:
    """Refuses a picture that grows too large on its way.

    Raises:
        InvalidRequestError: It has too many pixels then.
    """
    if height * width > MAX_RESIZED_PIXELS:
        raise image_too_large("has a shape that this model enlarges beyond what is allowed")
    return height, width


def cut(pixels: Pixels, height: int, width: int) -> list[Pixels]:
    """Tiles of this size, row by row; the picture is a multiple of it."""
    rows, columns = (range(0, whole, part) for whole, part in zip(pixels.shape[:2], (height, width), strict=True))
    return [pixels[row : row + height, column : column + width] for row in rows for column in columns]


def channels_first(crops: list[Pixels]) -> NDArray[np.uint8]:
    """Crops of one size, [crops, 3, height, width]."""
    return np.ascontiguousarray(np.stack(crops).transpose(0, 3, 1, 2))
