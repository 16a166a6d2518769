"""Sound as a model takes it: one channel at its rate, within a limit of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmstack_media.errors import audio_too_long, audio_too_short, invalid_audio
from llmstack_media.limits import MIN_SOUND_S
from llmstack_media.sound.av_blocks import av_blocks
from llmstack_media.sound.formats import HEAD_BYTES, WAV, sound_format
from llmstack_media.sound.resample import Resampler
from llmstack_media.sound.wave_files import Block, read_wave_format, wave_blocks

Samples = NDArray[np.float32]
_ANTIPHASE: Final = 0.01
"""Share of the louder channel's energy below which the mean of all channels is no mean of what was said."""


def sound_samples(file: BinaryIO, rate: int, max_s: float) -> Iterator[Samples]:
    """One channel at a rate in Hz, from -1 to 1, in pieces of a second or less.

    Memory does not grow with the length. Seconds are counted as they are decoded, whatever a header says.

    Raises:
        InvalidRequestError: The file is damaged, of no allowed format, or longer than `max_s`.
    """
    num_samples, max_samples = 0, int(max_s * rate)
    for piece in _resampled(_blocks(file), rate):
        num_samples += len(piece)
        if num_samples > max_samples:
            raise audio_too_long(f"is longer than the {max_s:g} s that are allowed")
        if len(piece):
            yield piece


def check_least(num_samples: int, rate: int) -> None:
    """Raises InvalidRequestError for sound in which nothing can be said. `rate`: In Hz."""
    if num_samples < MIN_SOUND_S * rate:
        raise audio_too_short(f"has {num_samples / rate:g} s; {MIN_SOUND_S:g} s are the least")


def _blocks(file: BinaryIO) -> Iterator[tuple[int, Block]]:
    head = file.read(HEAD_BYTES)
    demuxer = sound_format(head)
    if demuxer == WAV:
        wave = read_wave_format(file)
        if wave.is_plain:
            for block in wave_blocks(file, wave):
                yield wave.rate, block
            return
    file.seek(0)
    yield from av_blocks(file, demuxer)


def _resampled(blocks: Iterable[tuple[int, Block]], new_rate: int) -> Iterator[Samples]:
    """Blocks of any rates and channels as one channel at one rate. A file may change both in its middle."""
    resampler: Resampler | None = None
    for rate, mono in _seconds(blocks):
        if resampler is None or resampler.rate != rate:
            if resampler is not None:
                yield resampler.finish()
            resampler = Resampler(rate, new_rate)
        yield resampler.feed(mono)
    if resampler is not None:
        yield resampler.finish()


def _seconds(blocks: Iterable[tuple[int, Block]]) -> Iterator[tuple[int, Samples]]:
    """One channel, in pieces of a second: what is decided of a piece depends on no packet of a file."""
    waiting: list[Block] = []
    rate, num_waiting = 0, 0
    for block_rate, block in blocks:
        if waiting and (block_rate != rate or block.shape[1] != waiting[0].shape[1]):
            yield rate, mixed(np.concatenate(waiting))
            waiting, num_waiting = [], 0
        rate = block_rate
        waiting.append(block)
        num_waiting += len(block)
        while num_waiting >= rate:
            joined = np.concatenate(waiting)
            yield rate, mixed(joined[:rate])
            waiting, num_waiting = [joined[rate:]], num_waiting - rate
    if num_waiting:
        yield rate, mixed(np.concatenate(waiting))


def mixed(block: Block) -> Samples:
    """The mean of all channels; the loudest one where they cancel each other out."""
    mean: Samples = block.mean(axis=1, dtype=np.float32)
    if block.shape[1] == 1:
        return mean
    energies = np.square(block, dtype=np.float32).sum(axis=0)
    loudest = int(energies.argmax())
    is_cancelled = float(np.square(mean).sum()) < _ANTIPHASE * float(energies[loudest])
    return block[:, loudest].copy() if is_cancelled else mean


def as_floats(samples: ArrayLike) -> Samples:
    """A copy as float32 [num_samples], in which the range of an integer type is -1 to 1.

    Raises:
        InvalidRequestError: They are of several channels, or no finite numbers.
    """
    try:
        given = np.asarray(samples)
        floats = given.astype(np.float32)
    except (TypeError, ValueError) as error:
        raise invalid_audio("has samples that are no numbers") from error
    if given.ndim != 1 or given.dtype.kind not in "fi":
        raise invalid_audio("has other samples than numbers of one channel")
    if given.dtype.kind == "i":
        floats /= -float(np.iinfo(given.dtype).min)
    if not np.isfinite(floats).all():
        raise invalid_audio("has samples that are not finite")
    return floats
