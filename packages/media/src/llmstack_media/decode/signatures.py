"""The format of a file by its first bytes; names and declared types do not matter."""

from __future__ import annotations

from llmstack_media.errors import unsupported_format

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Names of the allowed formats, as Pillow has them."""
_STARTS = (
    (b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"), (b"GIF87a", "GIF"), (b"GIF89a", "GIF"), (b"BM", "BMP"),
    (b"II*\0", "TIFF"), (b"MM\0*", "TIFF"), (b"II+\0", "TIFF"), (b"MM\0+", "TIFF"),
)  # fmt: skip
_MAX_BRANDS_BYTES = 256


def format_of(data: bytes) -> str:
    """One of `FORMATS`.

    Raises:
        InvalidRequestError: The bytes begin like none of them; the code is `unsupported_media_format`.
    """
    for start, name in _STARTS:
        if data.startswith(start):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and _has_avif_brand(data):
        return "AVIF"
    raise unsupported_format()


def _has_avif_brand(data: bytes) -> bool:
    end = min(int.from_bytes(data[:4], "big"), _MAX_BRANDS_BYTES)
    brands = [data[8:12], *(data[at : at + 4] for at in range(16, end, 4))]
    return b"avif" in brands or b"avis" in brands
