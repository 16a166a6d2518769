"""Process whose children read pictures: `python -m llmstack_media.pool.process`.

A child gets a picture or video as sealed memory of the process that asks, and writes the array into memory that this
process made in the right size. It has no open socket but its link, and no file but these two. What a damaged picture
does to it is the end of one job.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image

from llmstack_media.decode.clips import decode_frames, read_clip
from llmstack_media.decode.headers import read_header
from llmstack_media.decode.pictures import decode_image
from llmstack_media.decode.pixels import WHITE, Color
from llmstack_media.limits import MediaLimits
from llmstack_media.memory import open_place
from llmstack_media.processors.checkpoints import Processors, processors
from llmstack_types import InvalidRequestError
from llmstack_types.child_pool.server import Work, serve_children

MAX_MEMORY_BYTES = 3 << 30
"""Address space of a child: the largest picture in four bytes per pixel, three times, and libraries."""


def work_on_pictures(configuration: dict[str, Any]) -> Work:
    """Work that reads a header, or prepares a picture or video.

    Args:
        configuration: `files` for `processors`, `limits` and `background`.
    """
    limits = MediaLimits(**configuration["limits"])
    made = processors(**configuration["files"])
    background = tuple(configuration.get("background") or WHITE)
    Image.init()  # all decoders, before a child is forked
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # one job has the time of one processor

    def work(job: dict[str, Any]) -> dict[str, Any]:
        try:
            data = _read(job["source"])
            if job["do"] == "header":
                header = read_header(data, limits)
                return {"width": header.width, "height": header.height}
            if job["do"] == "clip":
                return read_clip(data, limits)._asdict()
            return _prepare(job, lambda: _array(job, data, made, limits, background))
        except InvalidRequestError as error:
            return {"error": {"message": error.message, "code": error.code}}

    return work


def _array(
    job: dict[str, Any], data: bytes, made: Processors, limits: MediaLimits, background: Color
) -> NDArray[np.uint8]:
    detail, options = job["detail"], job["options"]
    if job["kind"] == "image" or made.video is None:
        chosen = made.image.for_detail(detail).with_options(options)
        return chosen.prepare(decode_image(data, limits, background))
    video = made.video.for_detail(detail).with_options(options)
    layout = video.layout(read_clip(data, limits))
    return video.prepare(decode_frames(data, layout.frames, limits, background), layout)


def _prepare(job: dict[str, Any], make_array: Callable[[], NDArray[np.uint8]]) -> dict[str, Any]:
    descriptor = open_place(job["target"], os.O_RDWR)  # before a decode, which the requester may not wait for
    try:
        array = make_array()
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
