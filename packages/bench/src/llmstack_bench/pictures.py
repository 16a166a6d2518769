"""Streams of text, and pictures that arrive while they run."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from dataclasses import replace

from llmstack_bench.errors import BenchError
from llmstack_bench.workload import BenchRequest, Message

MAX_PIXELS = 50_000_000
QUESTION = "What is in the picture?"


def picture_size(text: str) -> tuple[int, int]:
    """Width and height of a text such as `2048x1536`.

    Raises:
        ValueError: It is none, or has more than `MAX_PIXELS`.
    """
    width, height = (int(side) for side in text.lower().split("x"))
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise ValueError(f"{text}: sides are above 0, and {MAX_PIXELS} pixels the most")
    return width, height


def with_pictures(
    streams: list[BenchRequest], num_pictures: int, size: tuple[int, int], interval_s: float, seed: int
) -> list[BenchRequest]:
    """The streams, sent at once, and a request with a picture of its own every `interval_s` seconds after that.

    An answer about a picture has one token, so all gaps between tokens are those of the streams. Pictures differ
    between seeds, so none is found in a cache.
    """
    at_once = [replace(stream, arrival_s=0.0) for stream in streams]
    numbers = range(1, num_pictures + 1)
    return at_once + [_request(size, f"{seed}:{number}", number * interval_s) for number in numbers]


def without_pictures(requests: list[BenchRequest]) -> list[BenchRequest]:
    """The requests of a run that measures what the streams take alone."""
    return [request for request in requests if not request.has_picture]


def check_pictures(num_pictures: int, size: tuple[int, int], *, is_chat: bool) -> None:
    """Refuses a load before anything is sent.

    Raises:
        BenchError: The route takes no messages, or the pictures are too large together: all are made before the run.
    """
    if not is_chat:
        raise BenchError("--dataset-name pictures: needs a route of chat/completions in --endpoint", exit_code=2)
    if num_pictures * size[0] * size[1] > 4 * MAX_PIXELS:
        raise BenchError(f"--num-pictures {num_pictures}: {4 * MAX_PIXELS} pixels together are the most", exit_code=2)


def _request(size: tuple[int, int], seed: str, arrival_s: float) -> BenchRequest:
    url = "data:image/png;base64," + base64.b64encode(png(*size, seed)).decode("ascii")
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    messages: list[Message] = [{"role": "user", "content": content}]
    return BenchRequest(messages, 1, arrival_s, has_picture=True)


def png(width: int, height: int, seed: str) -> bytes:
    """A PNG in colour: one row of random values, shifted from row to row, so that it is small and quickly made."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    row = rng.randbytes(3 * width) * 2
    rows = b"".join(b"\0" + row[3 * shift : 3 * (shift + width)] for shift in (y % width for y in range(height)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
