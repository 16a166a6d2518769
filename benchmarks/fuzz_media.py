"""Targets of `fuzz_parsers.py` that are about media: the jobs of a decoder's child, and answers to a fetch.

A picture may be refused with a code of the error contract. A header and the pixels behind it must agree. A fetch may
dial only the address that was checked, whatever a server answers and wherever it redirects.
"""

from __future__ import annotations

import asyncio
import io
import random
from dataclasses import asdict
from functools import cache
from typing import Any

from PIL import Image

from llmstack_media import MediaLimits, image_processor
from llmstack_media.fetch.fetcher import Fetcher
from llmstack_media.fetch.policy import FetchPolicy
from llmstack_media.memory import SealedMemory
from llmstack_media.pool.process import work_on_pictures
from llmstack_types import InvalidRequestError
from llmstack_types.child_pool.server import Work

FILES = {
    "preprocessor": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
    },
    "processor": {"image_seq_len": 4},
    "model": {"vision_config": {"patch_size": 8}},
}
LIMITS = MediaLimits(max_image_pixels=1 << 18)
CODES = {"invalid_image", "image_too_large", "unsupported_media_format"}
PUBLIC = "93.184.216.34"
_ADDRESSES = (PUBLIC, "127.0.0.1", "10.0.0.1", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "169.254.169.254")


@cache
def _work() -> Work:
    return work_on_pictures({"files": FILES, "limits": asdict(LIMITS)})


def read_picture(data: bytes) -> None:
    """The two jobs of a picture, as a child does them."""
    source = SealedMemory.of(data)
    try:
        header = _done({"do": "header", "source": source.place})
        if header is None:
            return
        layout = image_processor(**FILES).layout(header["width"], header["height"])
        target = SealedMemory(layout.num_bytes)
        try:
            job = {"do": "prepare", "source": source.place, "target": target.place, "shape": list(layout.shape)}
            _done({**job, "kind": "image", "detail": "auto", "options": {}})
        finally:
            target.close()
    finally:
        source.close()


def _done(job: dict[str, Any]) -> dict[str, Any] | None:
    """The answer of a job; None for a refusal."""
    answer = _work()(job)
    if "error" not in answer:
        return answer
    if answer["error"]["code"] not in CODES:
        raise ValueError(answer["error"])
    return None


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = False

    def write(self, data: Any) -> None:
        return

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


def fetch(data: bytes) -> None:
    """A fetch from servers that answer with these bytes, one part for each connection."""
    asyncio.run(_fetch(data))


async def _fetch(data: bytes) -> None:
    head, *answers = data.split(b"\xff\xff")
    checked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        chosen = _ADDRESSES[sum(host.encode()) % len(_ADDRESSES)]
        checked.append(chosen)
        return [chosen]

    async def connect(address: str, port: int, name: str | None) -> Any:
        if address != PUBLIC or checked[-1] != PUBLIC:
            raise ValueError(f"{address} is dialled")
        reader = asyncio.StreamReader()
        reader.feed_data(answers.pop(0) if answers else b"")
        reader.feed_eof()
        protocol = asyncio.StreamReaderProtocol(reader)
        return reader, asyncio.StreamWriter(_Transport(), protocol, reader, asyncio.get_running_loop())

    policy = FetchPolicy(domains=("*",), timeout_s=5.0, max_bytes=1000)
    try:
        content = await Fetcher(policy, resolve=resolve, connect=connect).fetch(head.decode(errors="replace"))
    except InvalidRequestError:
        return
    if len(content) > policy.max_bytes:
        raise ValueError(f"{len(content)} bytes")


def picture_seeds() -> list[bytes]:
    """A picture of each format, and of odd modes."""
    colour = Image.frombytes("RGB", (12, 9), random.Random(0).randbytes(12 * 9 * 3))
    grey = colour.convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    shown = [_file(colour, kind, exif=exif) for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")]
    pairs = (("RGB", "GIF"), ("RGB", "BMP"), ("CMYK", "JPEG"), ("P", "PNG"), ("LA", "PNG"), ("1", "TIFF"))
    modes = [_file(colour.convert(mode), kind) for mode, kind in pairs]
    deep = [_file(grey.convert("I;16"), "PNG"), _file(grey.convert("F"), "TIFF")]
    packed = [
        _file(colour, "TIFF", compression=name) for name in ("tiff_lzw", "jpeg", "tiff_adobe_deflate", "packbits")
    ]
    more = {"save_all": True, "append_images": [colour.rotate(180)]}
    animated = [_file(colour, kind, **more) for kind in ("GIF", "WEBP")]
    return [*shown, *modes, *deep, *packed, *animated, _file(colour, "JPEG", progressive=True)]


def fetch_seeds() -> list[bytes]:
    """URLs, each with what servers answer."""
    found = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Type: image/png\r\n\r\nabc"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    moved = b"HTTP/1.1 302 Found\r\nLocation: %s\r\n\r\n"
    between = b"\xff\xff"
    host = next(f"{letter}.example" for letter in "abcdefgh" if sum(f"{letter}.example".encode()) % 7 == 0).encode()
    return [
        b"http://" + host + b"/a" + between + found,
        b"https://" + host + b"/a?b" + between + chunked,
        b"http://" + host + between + moved % b"/b" + between + moved % (b"//" + host + b"/c") + between + found,
        b"http://" + host + between + moved % b"http://127.0.0.1/" + between + found,
        b"data:image/png;base64,AAEC",
    ]


def _file(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
