"""Windows of speech on their way to an encoder: digest, spectrogram, store."""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from llmstack_media.audio.alignment import token_starts
from llmstack_media.budgets import FairBudget
from llmstack_media.errors import audio_too_long
from llmstack_media.memory import SealedMemory
from llmstack_media.parts import MediaStats, digest_of
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.sound.log_mel import LogMel, Samples
from llmstack_media.sound.resample import Resampler
from llmstack_media.sound.samples import as_floats
from llmstack_media.sound.wave_files import check_shape
from llmstack_media.store import Key, MediaStore, PreparedMedia
from llmstack_types import ServerOverloadedError
from llmstack_types.media import memory_name

_MAX_PLACES: Final = 2
"""Spectrograms that are computed at once: each takes 30 ms of a processor, and 25 MB."""
KEPT_BYTES: Final = 64 << 20
"""Of spectrograms that no request uses. A window is wanted again while its file is transcribed, and its vectors are
kept elsewhere: memory does not grow with the length of a file."""
_CONVOLUTION_STRIDE: Final = 2
"""Frames of a spectrogram for each one of the encoder."""


class OpenedWindow:
    """Sound of one window, whose spectrogram is not computed yet.

    Attributes:
        digest: Names its vectors, as `MediaItem.digest`.
        num_samples: Of the sound, without the silence behind it.
        pieces: Nothing stands in a prompt for it.
    """

    def __init__(self, front: WindowFront, log_mel: LogMel, key: Key, samples: Samples) -> None:
        self._front = front
        self._log_mel = log_mel
        self._key = key
        self._samples = samples
        self.digest = key[1]
        self.num_samples = len(samples)
        self.pieces: tuple[tuple[str, int], ...] = ()

    async def prepare(self) -> PreparedMedia:
        """Its spectrogram, from the store or computed now. It may be asked for again, by a retry of the same window.

        Raises:
            ServerOverloadedError: There is no memory for it, or too many wait.
        """
        return await self._front._prepare(self._log_mel, self._key, self._samples)

    def close(self) -> None:
        """Nothing is fetched for a window: its samples are the caller's."""


class WindowFront:
    """Windows of one model's requests. Used by one event loop.

    Attributes:
        log_mel: How they are prepared.
    """

    def __init__(self, log_mel: LogMel, *, cache_bytes: int = KEPT_BYTES, max_held_bytes: int = 4 << 30) -> None:
        """Limits of memory.

        Args:
            log_mel: How windows are prepared.
            cache_bytes: Of spectrograms that are kept for later requests, `KEPT_BYTES` at most.
            max_held_bytes: Of those that running requests use.
        """
        self.log_mel = log_mel
        self._store = MediaStore(min(cache_bytes, KEPT_BYTES), max_held_bytes)
        self._places = FairBudget(_MAX_PLACES, _MAX_PLACES)
        self._num_bytes = 0

    @property
    def stats(self) -> MediaStats:
        """Counts of the work so far, for metrics."""
        return MediaStats(self._store.num_queries, self._store.num_hits, self._num_bytes, 0.0, {}, {})

    async def open(
        self, samples: ArrayLike, tenant: str = "", rate: int | None = None, silence_s: int | None = None
    ) -> OpenedWindow:
        """A window of sound.

        Args:
            samples: At most `log_mel.window_s` of one channel, from -1 to 1, or of an integer type.
            tenant: An opaque id of the API key.
            rate: Of the samples, in Hz; None is the model's. Those of another rate are converted.
            silence_s: Seconds of silence behind it at least, of a window that may be shorter than the model's; None is
                silence to the end of a whole window.

        Raises:
            InvalidRequestError: They are too many, of several channels, no finite numbers, or of a rate that no sound
              has.
        """
        copied, own_rate = as_floats(samples), self.log_mel.sample_rate
        rate = own_rate if rate is None else rate
        check_shape(1, rate)
        if len(copied) * own_rate > self.log_mel.num_samples * rate:
            raise audio_too_long(f"is longer than a window of {self.log_mel.window_s} s")
        if rate != own_rate:
            copied = await asyncio.to_thread(_converted, copied, rate, own_rate)
        log_mel = self.log_mel
        if silence_s is not None:
            log_mel = log_mel.shortened(len(copied) + silence_s * log_mel.sample_rate)
        digest = await asyncio.to_thread(_digest, log_mel, copied)
        self._num_bytes += copied.nbytes
        return OpenedWindow(self, log_mel, (tenant, digest), copied)

    def token_starts(self, weights: memoryview, num_tokens: int, num_samples: int) -> list[float]:
        """When each of some tokens begins, in seconds of the window.

        `weights`: How much they attend to its states, float32 [num_tokens, num_heads, num_states].
        `num_samples`: Of the sound, without the silence behind it.
        """
        stride = _CONVOLUTION_STRIDE * self.log_mel.hop
        numbers = np.frombuffer(weights, dtype=np.float32)
        shaped = numbers.reshape(num_tokens, -1, self.log_mel.num_samples // stride)
        starts = token_starts(shaped, num_samples // stride)
        return [start * stride / self.log_mel.sample_rate for start in starts]

    def close(self) -> None:
        """Frees all memory. Nothing may be held any more."""
        self._store.close()

    async def _prepare(self, log_mel: LogMel, key: Key, samples: Samples) -> PreparedMedia:
        entry = self._store.acquire(key)
        if entry is None:
            num_bytes = log_mel.num_bytes
            async with self._places.hold(key[0], 1):
                self._store.reserve(key[0], num_bytes)
                try:
                    memory = await asyncio.to_thread(_filled, log_mel, key, samples)
                except BaseException:
                    self._store.cancel(key[0], num_bytes)
                    raise
            entry = self._store.add(key, _layout(log_mel), memory)
        return PreparedMedia(self._store, entry, "audio")


def _converted(samples: Samples, rate: int, new_rate: int) -> Samples:
    """A window at another rate, as a file of it would be read."""
    resampler = Resampler(rate, new_rate)
    return np.concatenate([resampler.feed(samples), resampler.finish()])


def _digest(log_mel: LogMel, samples: Samples) -> bytes:
    return digest_of((("kind", "audio"), *log_mel.identity()), samples.tobytes())


def _layout(log_mel: LogMel) -> ImageLayout:
    num_frames = log_mel.num_frames
    return ImageLayout((log_mel.num_bins, num_frames, 4), (num_frames,), num_frames // _CONVOLUTION_STRIDE, 1)


def _filled(log_mel: LogMel, key: Key, samples: Samples) -> SealedMemory:
    try:
        return SealedMemory.of(log_mel.compute(samples).tobytes(), memory_name(key[1]))
    except OSError as error:
        raise ServerOverloadedError("there is no memory for sound", reason="media") from error
