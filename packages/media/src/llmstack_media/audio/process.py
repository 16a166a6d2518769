"""Process whose children decode sound: `python -m llmstack_media.audio.process`.

A child reads a file that the process that asks has open, and writes samples into another one: float32 at the rate of
the model, then the level of each piece of 20 ms. It ends early where the target is closed: no
request waits for it then.
"""

from __future__ import annotations

import errno
import importlib
import os
from typing import Any, BinaryIO

import numpy as np

from llmstack_media.audio.level_meter import LevelMeter
from llmstack_media.containers import has_av
from llmstack_media.memory import open_place
from llmstack_media.pool.process import MAX_MEMORY_BYTES, quiet
from llmstack_media.sound.samples import sound_samples
from llmstack_types import InvalidRequestError
from llmstack_types.child_pool.server import Work, serve_children


def work_on_sound(configuration: dict[str, Any]) -> Work:
    """Work that decodes a file. `configuration`: `rate` in Hz, and `max_s`."""
    rate, max_s = configuration["rate"], configuration["max_s"]
    if has_av():
        importlib.import_module("av")  # before a child is forked

    def work(job: dict[str, Any]) -> dict[str, Any]:
        try:
            with (
                os.fdopen(open_place(job["source"], os.O_RDONLY), "rb") as source,
                os.fdopen(open_place(job["target"], os.O_RDWR), "wb") as target,
            ):
                source.seek(0)  # a descriptor of the same file may share its place
                return {"num_samples": _decode(source, target, job["target"], rate, max_s)}
        except InvalidRequestError as error:
            return {"error": {"message": error.message, "code": error.code}}
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            return {"is_full": True}

    return work


def _decode(source: BinaryIO, target: BinaryIO, place: dict[str, Any], rate: int, max_s: float) -> int:
    """Writes samples and levels; the number of samples."""
    num_samples, meter, levels = 0, LevelMeter(rate), []
    for samples in sound_samples(source, rate, max_s):
        os.close(open_place(place, os.O_RDONLY))  # ends this child where no request waits for it
        target.write(np.clip(samples, -1.0, 1.0).tobytes())
        num_samples += len(samples)
        levels.append(meter.feed(samples))
    levels.append(meter.finish())
    target.write(np.concatenate(levels).tobytes())
    return num_samples


def main() -> None:
    """Works on the jobs of standard input to its end."""
    serve_children(quiet(work_on_sound), max_memory_bytes=MAX_MEMORY_BYTES)


if __name__ == "__main__":
    main()
