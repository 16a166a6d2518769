"""Format and size of a picture from its header, without decoding a pixel."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import ExifTags, Image, UnidentifiedImageError

from llmstack_media.decode.signatures import format_of
from llmstack_media.errors import image_too_large, invalid_image
from llmstack_media.limits import MediaLimits
from llmstack_types import InvalidRequestError

_SIDEWAYS = (5, 6, 7, 8)
_MAX_CHUNKS = 65_536


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """A picture before it is decoded.

    Attributes:
        format: Its format, as Pillow names it.
        width: Of the picture as it is shown, after its orientation is applied.
        height: Of the same.
        orientation: How it has to be transposed: the EXIF value, 1 to 8.
    """

    format: str
    width: int
    height: int
    orientation: int = 1


def read_header(data: bytes, limits: MediaLimits) -> ImageHeader:
    """Reads and checks the header of a picture.

    Raises:
        InvalidRequestError: It has no allowed format, its header is damaged, or it exceeds a limit.
    """
    with opened(data) as image:
        return checked_header(image, data, limits)


def checked_header(image: Image.Image, data: bytes, limits: MediaLimits) -> ImageHeader:
    """The header of an opened picture, within the limits.

    Raises:
        InvalidRequestError: It exceeds a limit.
    """
    orientation = _orientation_of(image, data)
    width, height = image.size
    if orientation in _SIDEWAYS:
        width, height = height, width
    check_size(width, height, limits)
    return ImageHeader(format_of(data), width, height, orientation)


def check_size(width: int, height: int, limits: MediaLimits) -> None:
    """Refuses a picture by its size.

    Raises:
        InvalidRequestError: Too many pixels, too long and narrow, or empty.
    """
    if width < 1 or height < 1:
        raise invalid_image("has no pixels")
    if width * height > limits.max_image_pixels:
        raise image_too_large(f"has {width} × {height} pixels; at most {limits.max_image_pixels} are allowed")
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise invalid_image(
            f"has {width} × {height} pixels; one side may be at most {limits.max_aspect_ratio} times the other"
        )


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Opens a picture of an allowed format; what any decoder raises over it becomes a refusal.

    Raises:
        InvalidRequestError: It has no allowed format, or is damaged.
    """
    name = format_of(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, over odd files; our own limits decide
            with Image.open(io.BytesIO(data), formats=[name]) as image:
                yield image
    except InvalidRequestError:
        raise
    except Image.DecompressionBombError as error:
        raise image_too_large("has far too many pixels") from error
    except MemoryError as error:
        raise image_too_large("needs more memory to decode than is allowed") from error
    except UnidentifiedImageError as error:
        raise invalid_image("cannot be read: its header is damaged") from error
    except Exception as error:  # decoders raise almost anything over damaged files
        raise invalid_image("cannot be read: it is damaged or truncated") from error


def _orientation_of(image: Image.Image, data: bytes) -> int:
    """The EXIF orientation; 1 where there is none or its block is damaged. Pillow transposes a TIFF itself."""
    if image.format == "TIFF":
        return 1
    if image.format == "PNG" and "exif" not in image.info and (exif := _exif_of_png(data)) is not None:
        image.info["exif"] = exif
    try:
        # Not PngImageFile's own method, which decodes all pixels to find a block behind them.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - a damaged block is no reason to refuse a picture, and parsers raise almost anything
        return 1
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def _exif_of_png(data: bytes) -> bytes | None:
    """The block `eXIf` of a PNG, which may stand behind the pixels."""
    at = 8
    for _ in range(_MAX_CHUNKS):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if len(kind) < 4 or kind == b"IEND":
            return None
        if kind == b"eXIf":
            return b"Exif\0\0" + data[at + 8 : at + 8 + length]
        at += 12 + length
    return None
