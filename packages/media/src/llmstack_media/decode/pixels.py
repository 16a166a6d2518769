"""Pixels of every mode that pictures come in, as RGB of eight bits."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llmstack_media.errors import invalid_image

Color = tuple[int, int, int]
WHITE: Color = (255, 255, 255)
_TRANSPOSED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip


def to_rgb(image: Image.Image, background: Color = WHITE) -> Image.Image:
    """A loaded picture as RGB; what is transparent shows the background.

    Samples of 16 or 32 bits are scaled to eight: Pillow's own conversion cuts them off at 255, which turns most of a
    picture white.

    Raises:
        InvalidRequestError: Its mode has no defined conversion.
    """
    if image.mode.startswith("I;16"):
        image = _from_16_bits(image)
    elif image.mode in ("I", "F"):
        image = Image.fromarray(_to_8_bits(np.asarray(image)))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        above = image.convert("RGBA")
        below = Image.new("RGBA", above.size, (*background, 255))
        return Image.alpha_composite(below, above).convert("RGB")
    return image.convert("RGB")


def as_png(pixels: object) -> bytes:
    """A file of an array of RGB, uint8 [height, width, 3].

    Raises:
        ValueError: It is another array, or empty.
    """
    array = np.asarray(pixels)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise ValueError(f"it is of {array.dtype} {list(array.shape)}, and not of uint8 [height, width, 3]")
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def as_shown(image: Image.Image, orientation: int) -> Image.Image:
    """The picture as it is shown. `orientation`: The EXIF value, 1 to 8."""
    return image if orientation == 1 else image.transpose(_TRANSPOSED[orientation])


def _from_16_bits(image: Image.Image) -> Image.Image:
    samples = np.asarray(image)
    grey = Image.fromarray((samples >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        alpha = Image.fromarray(np.where(samples == transparent, 0, 255).astype(np.uint8))
        return Image.merge("LA", (grey, alpha))
    return grey


def _to_8_bits(samples: NDArray[np.int32] | NDArray[np.float32]) -> NDArray[np.uint8]:
    """Grey values of 32 bits. They have the fewest bits that hold the largest one; fractions up to 1 are of 255."""
    if samples.dtype.kind == "f":
        values = np.nan_to_num(samples, nan=0.0, posinf=np.inf, neginf=0.0)
        largest = float(values.max())
        if largest > 65_535:
            raise invalid_image("has floating-point samples above 65535")
        scaled = values * 255 if largest <= 1 else values / 257 if largest > 255 else values
        return np.clip(np.round(scaled), 0, 255).astype(np.uint8)
    largest = int(samples.max())
    shift = 0 if largest <= 255 else 8 if largest <= 65_535 else 23
    return np.clip(samples, 0, None).astype(np.uint32).__rshift__(shift).astype(np.uint8)
