"""Odd files that clients send as pictures: each with the picture that it shows, or the code of its refusal."""

from __future__ import annotations

import base64
import io
from typing import Any, NamedTuple

import numpy as np
from media_helpers.pictures import as_file, bomb, noise, orientation
from PIL import Image, ImageOps

COLOUR = Image.fromarray(noise(np.random.default_rng(11), 48, 32))


class OddPicture(NamedTuple):
    """A `data:` URL, and either the picture that it shows or the code of its refusal."""

    url: str
    shows: Image.Image | str


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def odd_pictures() -> dict[str, OddPicture]:
    """The table of the tests, by name."""
    return {
        name: OddPicture(value if isinstance(value, str) else url_of(value), shows)
        for name, (value, shows) in (_rotated() | _modes() | _animations() | _encodings() | _refused()).items()
    }


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def _rotated() -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for value in range(2, 9):
        data = as_file(COLOUR, "JPEG", exif=orientation(value), quality=95)
        found[f"jpeg-rotated-{value}"] = data, ImageOps.exif_transpose(_opened(data))
    for kind in ("PNG", "TIFF"):
        data = as_file(COLOUR, kind, exif=orientation(6))
        found[f"{kind.lower()}-rotated"] = data, ImageOps.exif_transpose(COLOUR_WITH_EXIF)
    broken = as_file(COLOUR, exif=b"Exif\0\0garbage" * 9)
    return {**found, "broken-exif": (broken, COLOUR)}


COLOUR_WITH_EXIF = COLOUR.copy()
COLOUR_WITH_EXIF.getexif()[0x0112] = 6


def _modes() -> dict[str, tuple[Any, Any]]:
    ramp = np.arange(0, 65536, 32, dtype=np.uint16).reshape(32, 64)
    grey = Image.fromarray((ramp >> 8).astype(np.uint8)).convert("RGB")
    cmyk = as_file(COLOUR.convert("CMYK"), "JPEG", quality=100)
    red = Image.new("RGBA", (48, 32), (255, 0, 0, 0))
    red.paste(COLOUR.crop((0, 0, 24, 32)), (0, 0))
    half = Image.new("RGB", (48, 32), "white")
    half.paste(COLOUR.crop((0, 0, 24, 32)), (0, 0))
    palette = Image.new("P", (48, 32), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    white = Image.new("RGB", (48, 32), "white")
    return {
        "cmyk": (cmyk, _opened(cmyk).convert("RGB")),
        "16-bit": (as_file(Image.fromarray(ramp)), grey),
        "32-bit": (as_file(Image.fromarray(ramp.astype(np.int32)), "TIFF"), grey),
        "rgba": (as_file(red), half), "rgba-webp": (as_file(red, "WEBP", lossless=True), half),
        "la": (as_file(Image.new("LA", (48, 32), (7, 0))), white),
        "palette-png": (as_file(palette, transparency=0), white),
        "palette-gif": (as_file(palette, "GIF", transparency=0), white),
        "tiny": (as_file(Image.new("RGB", (1, 1), (9, 99, 199))), Image.new("RGB", (1, 1), (9, 99, 199))),
    }  # fmt: skip


def _animations() -> dict[str, tuple[Any, Any]]:
    frames = [Image.new("RGB", (48, 32), (50 * index, 0, 0)) for index in range(5)]
    options: dict[str, dict[str, Any]] = {"GIF": {}, "PNG": {}, "WEBP": {"lossless": True}}
    return {
        f"animated-{kind.lower()}": (
            as_file(frames[0], kind, save_all=True, append_images=frames[1:], duration=200, **more), frames[0]
        )
        for kind, more in options.items()
    }  # fmt: skip


def _encodings() -> dict[str, tuple[Any, Any]]:
    data = as_file(COLOUR)
    text, start = base64.b64encode(data).decode(), "data:image/png;base64,"
    unpadded = base64.b64encode(data + b"x" * (1 - len(data) % 3)).decode().rstrip("=")
    jpeg = as_file(COLOUR, "JPEG")
    return {
        "another-type": (url_of(jpeg, "image/png"), _opened(jpeg)),
        "no-picture-type": (url_of(data, "image/x-unknown"), COLOUR),
        "lines-and-spaces": (start + "\n \r\t".join([text[:61], text[61:200], text[200:]]), COLOUR),
        "url-alphabet": (start + _with_both_signs(), "invalid_image"),
        "no-padding": (start + unpadded, "invalid_image"),

        "other-characters": (start + text[:40] + "!" + text[41:], "invalid_image"),
    }  # fmt: skip


def _with_both_signs() -> str:
    return base64.urlsafe_b64encode(b"\x89PNG\r\n\x1a\n" + b"\xfb\xff\xfe" * 9).decode()


def _refused() -> dict[str, tuple[Any, Any]]:
    png, jpeg = as_file(COLOUR), as_file(COLOUR, "JPEG")
    other = "unsupported_media_format"
    return {
        "truncated-png": (png[: len(png) // 2], "invalid_image"),
        "truncated-jpeg": (jpeg[: len(jpeg) // 2], "invalid_image"),
        "bomb-15000": (bomb(15_000, 15_000), "image_too_large"),
        "bomb-13000": (bomb(13_000, 13_000), "image_too_large"),
        "long": (as_file(Image.new("RGB", (1, 5000))), "invalid_image"),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", other),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n", other),
        "psd": (b"8BPS\0\1" + bytes(40), other),
        "pdf": (b"%PDF-1.7\n", other),
        "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", other),
        "empty": (b"", other),
        "text": (b"hello", other),
        "html": (b"<!doctype html><title>404</title>", other),
    }  # fmt: skip
