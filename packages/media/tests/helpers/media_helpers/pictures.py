"""Pictures for tests: random ones of every mode, and as files of every format."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def noise(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """A smooth picture with noise on it, [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (3 + 9 * rng.random()) + channel) + np.cos(y / (2 + 7 * rng.random())) for channel in range(3)]
    values = 127 + 50 * np.stack(waves, axis=-1) + rng.integers(-30, 30, size=(height, width, 3))
    return np.clip(values, 0, 255).astype(np.uint8)


def picture(rng: np.random.Generator, mode: str, width: int, height: int) -> Image.Image:
    """A random picture of a mode of Pillow."""
    colour = Image.fromarray(noise(rng, width, height))
    if mode == "P":
        return colour.quantize(64)
    if mode == "I;16":
        return Image.fromarray(noise(rng, width, height)[..., 0].astype(np.uint16) * 257)
    if mode in ("RGBA", "LA"):
        alpha = Image.fromarray(noise(rng, width, height)[..., 0])
        base = colour.convert("L") if mode == "LA" else colour
        return Image.merge(mode, (*base.split(), alpha))
    return colour.convert(mode)


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The picture as a file of a format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def orientation(value: int) -> Image.Exif:
    """An EXIF block that says how a picture has to be turned."""
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(width: int, height: int) -> bytes:
    """A PNG of one bit per pixel, all black, a thousandth of its size as RGB."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
