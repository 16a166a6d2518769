"""Sound of compressed formats, by PyAV where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from llmstack_media.errors import invalid_audio, sound_decoder_missing
from llmstack_media.sound.wave_files import Block, check_shape
from llmstack_types import InvalidRequestError

_FULL_SCALES: Final = {"u": 1 << 7, "i2": 1 << 15, "i4": 1 << 31, "i8": 1 << 63}
_MAX_FAULTS: Final = 1000
"""Packets that no decoder takes, before the file counts as damaged: a cut file has one, noise has nothing else."""


def has_av() -> bool:
    """Whether PyAV is installed."""
    return importlib.util.find_spec("av") is not None


def av_blocks(file: BinaryIO, demuxer: str) -> Iterator[tuple[int, Block]]:
    """The first sound of a file in blocks, each with its rate in Hz.

    FFmpeg gets an open file, the one demuxer that its first bytes name, and no protocol: without that a text that
    names an address made it open a connection. What a header says of the duration is not looked at.

    Raises:
        InvalidRequestError: The file is damaged or has no sound, or PyAV is not installed.
    """
    if not has_av():
        raise sound_decoder_missing()
    av: Any = importlib.import_module("av")
    fault: type[Exception] = av.error.FFmpegError
    options, name = {"format_whitelist": demuxer, "protocol_whitelist": "none"}, demuxer.partition(",")[0]
    try:
        with av.open(file, mode="r", format=name, options=options, metadata_errors="ignore") as found:
            if not found.streams.audio:
                raise invalid_audio("has no sound in it")
            yield from _frames(found, fault)
    except InvalidRequestError:  # one of ours, which is a ValueError too
        raise
    except (fault, ValueError, EOFError) as error:
        raise invalid_audio("is damaged, or not of the format that it begins as") from error


def _frames(container: Any, ffmpeg_error: type[Exception]) -> Iterator[tuple[int, Block]]:
    num_faults, has_sound = 0, False
    packets = container.demux(container.streams.audio[0])
    while True:
        try:
            packet = next(packets, None)
        except ffmpeg_error:
            if not has_sound:
                raise
            return  # what there is of a file that was cut
        if packet is None:
            return
        try:
            frames = packet.decode()
        except ffmpeg_error:
            num_faults += 1
            if num_faults > _MAX_FAULTS:
                raise
            continue
        for frame in frames:
            has_sound = True
            check_shape(frame.layout.nb_channels, frame.sample_rate)
            yield frame.sample_rate, _as_block(frame)


def _as_block(frame: Any) -> Block:
    values: NDArray[Any] = frame.to_ndarray()
    block = values.T if frame.format.is_planar else values.reshape(-1, frame.layout.nb_channels)
    if block.dtype.kind == "f":
        finite: Block = np.clip(np.nan_to_num(block), -1.0, 1.0).astype(np.float32)
        return finite
    scale = _FULL_SCALES.get(block.dtype.kind) or _FULL_SCALES[block.dtype.str[1:]]
    offset = scale if block.dtype.kind == "u" else 0
    scaled: Block = (block.astype(np.float32) - np.float32(offset)) / np.float32(scale)
    return scaled
