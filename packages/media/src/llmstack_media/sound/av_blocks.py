"""Sound of compressed formats, by PyAV where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from llmstack_media.containers import ffmpeg_error, has_av, opened_container
from llmstack_media.errors import invalid_audio, sound_decoder_missing
from llmstack_media.sound.wave_files import Block, check_shape

_FULL_SCALES: Final = {"u": 1 << 7, "i2": 1 << 15, "i4": 1 << 31, "i8": 1 << 63}
_MAX_FAULTS: Final = 1000
"""Packets that no decoder takes, before the file counts as damaged: a cut file has one, noise has nothing else."""


def av_blocks(file: BinaryIO, demuxer: str) -> Iterator[tuple[int, Block]]:
    """The first sound of a file in blocks, each with its rate in Hz.

    What a header says of the duration is not looked at.

    Raises:
        InvalidRequestError: The file is damaged or has no sound, or PyAV is not installed.
    """
    if not has_av():
        raise sound_decoder_missing()
    with opened_container(file, demuxer, invalid_audio) as found:
        if not found.streams.audio:
            raise invalid_audio("has no sound in it")
        yield from _frames(found, ffmpeg_error())


def _frames(container: Any, fault: type[Exception]) -> Iterator[tuple[int, Block]]:
    num_faults, has_sound = 0, False
    packets = container.demux(container.streams.audio[0])
    while True:
        try:
            packet = next(packets, None)
        except fault:
            if not has_sound:
                raise
            return  # what there is of a file that was cut
        if packet is None:
            return
        try:
            frames = packet.decode()
        except fault:
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
