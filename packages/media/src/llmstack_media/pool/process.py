"""Process whose children read pictures: `python -m llmstack_media.pool.process`.

A child gets a picture as sealed memory of the process that asks, and writes the array into memory that this process
made in the right size. It has no open socket but its link, and no file but these two. What a damaged picture does to
it is the end of one job.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image

from llmstack_media.decode.headers import read_header
from llmstack_media.decode.pictures import decode_image
from llmstack_media.decode.pixels import WHITE
from llmstack_media.limits import MediaLimits
from llmstack_media.memory import open_place
from llmstack_media.processors.checkpoints import image_processor
from llmstack_media.processors.processor import ImageProcessor
from llmstack_types import InvalidRequestError
from llmstack_types.child_pool.server import Work, serve_children

MAX_MEMORY_BYTES = 3 << 30
"""Address space of a child: the largest picture in four bytes per pixel, three times, and libraries."""


def work_on_pictures(configuration: dict[str, Any]) -> Work:
    """Work that reads a header, or prepares a picture.

    Args:
        configuration: `files` for `image_processor`, `limits` and `background`.
    """
    limits = MediaLimits(**configuration["limits"])
    processor = image_processor(**configuration["files"])
    background = tuple(configuration.get("background") or WHITE)
    Image.init()  # all decoders, before a child is forked
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # one job has the time of one processor

    def work(job: dict[str, Any]) -> dict[str, Any]:
        try:
            data = _read(job["source"])
            if job["do"] == "header":
                header = read_header(data, limits)
                return {"width": header.width, "height": header.height}
            return _prepare(job, data, _decoder(limits, background), processor)
        except InvalidRequestError as error:
            return {"error": {"message": error.message, "code": error.code}}

    return work


def _decoder(limits: MediaLimits, background: Any) -> Callable[[bytes], NDArray[np.uint8]]:
    return lambda data: decode_image(data, limits, background)


def _prepare(
    job: dict[str, Any], data: bytes, decode: Callable[[bytes], NDArray[np.uint8]], processor: ImageProcessor
) -> dict[str, Any]:
    descriptor = open_place(job["target"], os.O_RDWR)  # before a decode, which the requester may not wait for
    try:
        chosen = processor.for_detail(job["detail"]).with_options(job["options"])
        array = chosen.prepare(decode(data))
        if list(array.shape) != job["shape"]:
            raise ValueError(f"an array of {array.shape} where {job['shape']} was announced")  # ends this child
        view = array.data.cast("B")
        written = 0
        while written < len(view):
            written += os.pwrite(descriptor, view[written:], written)
    finally:
        os.close(descriptor)
    return {}


def _read(memory: dict[str, Any]) -> bytes:
    with os.fdopen(open_place(memory, os.O_RDONLY), "rb") as file:
        return file.read()


def quiet(prepare: Callable[[dict[str, Any]], Work]) -> Callable[[dict[str, Any]], Work]:
    """The same work without an output of errors: decoders write a line there for every fault of a file."""

    def prepared(configuration: dict[str, Any]) -> Work:
        work = prepare(configuration)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.close(nothing)
        return work

    return prepared


def main() -> None:
    """Works on the jobs of standard input to its end."""
    serve_children(quiet(work_on_pictures), max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
