"""Process whose children read media: `python -m llmstack_media.pool.process`.

A child gets an item as sealed memory of the process that asks, and writes the array into memory that this
process made in the right size. It has no open socket but its link, and no file but these two. What a damaged picture
does to it is the end of one job.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image

from llmstack_media.containers import has_av
from llmstack_media.decode.clips import decode_frames, read_clip
from llmstack_media.decode.headers import read_header
from llmstack_media.decode.pictures import decode_image
from llmstack_media.decode.pixels import WHITE, Color
from llmstack_media.limits import MediaLimits
from llmstack_media.memory import open_place
from llmstack_media.processors.checkpoints import Processors, processors
from llmstack_media.processors.sound import SoundProcessor
from llmstack_media.sound.samples import Samples, check_least, sound_samples
from llmstack_types import InvalidRequestError
from llmstack_types.child_pool.server import Work, serve_children

MAX_MEMORY_BYTES = 3 << 30
"""Address space of a child: the largest picture in four bytes per pixel, three times, and libraries."""


def work_on_pictures(configuration: dict[str, Any]) -> Work:
    """Work that reads a header, counts the samples of a sound, or prepares an item.

    Args:
        configuration: `files` for `processors`, `limits` and `background`.
    """
    limits = MediaLimits(**configuration["limits"])
    made = processors(**configuration["files"])
    background = tuple(configuration.get("background") or WHITE)
    Image.init()  # all decoders, before a child is forked
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # one job has the time of one processor
    if (made.audio is not None or made.video is not None) and has_av():
        importlib.import_module("av")

    def work(job: dict[str, Any]) -> dict[str, Any]:
        try:
            data = _read(job["source"])
            if job["do"] == "header":
                header = read_header(data, limits)
                return {"width": header.width, "height": header.height}
            if job["do"] == "clip":
                return read_clip(data, limits)._asdict()
            if job["do"] == "sound" and made.audio is not None:
                rate = made.audio.sample_rate
                num_samples = sum(map(len, sound_samples(io.BytesIO(data), rate, job["max_s"])))
                check_least(num_samples, rate)
                return {"num_samples": num_samples}
            return _prepare(job, lambda: _array(job, data, made, limits, background))
        except InvalidRequestError as error:
            return {"error": {"message": error.message, "code": error.code}}

    return work


def _array(
    job: dict[str, Any], data: bytes, made: Processors, limits: MediaLimits, background: Color
) -> NDArray[np.uint8]:
    detail, options = job["detail"], job["options"]
    if job["kind"] == "audio" and made.audio is not None:
        return made.audio.with_options(options).prepare(_samples(data, made.audio, limits))
    if job["kind"] == "image" or made.video is None:
        chosen = made.pictures.for_detail(detail).with_options(options)
        return chosen.prepare(decode_image(data, limits, background))
    video = made.video.for_detail(detail).with_options(options)
    layout = video.layout(read_clip(data, limits))
    return video.prepare(decode_frames(data, layout.frames, limits, background), layout)


def _samples(data: bytes, processor: SoundProcessor, limits: MediaLimits) -> Samples:
    max_s = min(processor.max_s, limits.max_audio_s)
    samples = np.concatenate([*sound_samples(io.BytesIO(data), processor.sample_rate, max_s)])
    clipped: Samples = np.clip(samples, -1.0, 1.0, out=samples)
    return clipped


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
