"""Sound that comes piece by piece, and can be read while it grows."""

from __future__ import annotations

import asyncio
import os
from typing import BinaryIO, Final

import numpy as np

from llmstack_media.audio.level_meter import LevelMeter
from llmstack_media.audio.stored_sound import SAMPLE_BYTES, StoredSound
from llmstack_media.errors import audio_too_long, invalid_audio, no_room
from llmstack_media.shares import Shares
from llmstack_media.sound.resample import Resampler
from llmstack_media.sound.samples import Samples

PCM_RATES: Final = (16_000, 24_000, 48_000)
_PCM_BYTES: Final = 2
_SHARE_BYTES: Final = 1 << 20
"""Room on the disk that is taken at once: 16 seconds at 16 kHz."""


class LiveSound(StoredSound):
    """Sound of which there is more and more until it ends.

    Once it has ended, samples and levels are those of a WAV file with the same bytes.

    Attributes:
        has_ended: Whether there will be no more.
    """

    def __init__(
        self, file: BinaryIO, given_rate: int, rate: int, shares: Shares, tenant: str, max_s: float
    ) -> None:  # fmt: skip
        """Sound comes at `given_rate`, one of `PCM_RATES`, and becomes `rate`; `file` is this object's.

        `shares`: Of the disk, in bytes. `max_s`: Seconds that it may have.
        """
        super().__init__(file, rate, shares, tenant)
        self.has_ended = False
        self._resampler = Resampler(given_rate, rate)
        self._meter = LevelMeter(rate)
        self._max_samples = int(max_s * rate)
        self._piece_bytes = given_rate * _PCM_BYTES
        self._growth = asyncio.Event()

    async def add(self, data: bytes) -> None:
        """Adds samples: integers of 16 bits, little-endian. Calls follow one another.

        Raises:
            InvalidRequestError: They end within a sample, or are too many; nothing was added.
            ServerOverloadedError: There is no room for them on the disk.
        """
        if len(data) % _PCM_BYTES:
            raise invalid_audio(f"has {len(data)} bytes, which are no samples of 16 bits")
        given_rate = self._piece_bytes // _PCM_BYTES
        if self.num_samples + len(data) // _PCM_BYTES * self.rate // given_rate > self._max_samples:
            raise audio_too_long(f"is longer than the {self._max_samples / self.rate:g} s that are allowed")
        for start in range(0, len(data), self._piece_bytes):  # a second each, between which others run
            integers = np.frombuffer(data[start : start + self._piece_bytes], "<i2")
            samples = integers.astype(np.float32) / np.float32(1 << 15)
            await self._keep(await asyncio.to_thread(self._resampler.feed, samples))

    async def end(self) -> None:
        """Ends it, with what is left of the conversion to the other rate. Idempotent."""
        if not self.has_ended:
            await self._keep(self._resampler.finish())
            self.levels.frombytes(self._meter.finish().tobytes())
            self.has_ended = True
            self._growth.set()

    async def wait_for_growth(self, num_samples: int) -> None:
        """Returns once it has more samples than `num_samples`, or has ended."""
        while self.num_samples <= num_samples and not self.has_ended:
            self._growth.clear()
            await self._growth.wait()

    async def _keep(self, samples: Samples) -> None:
        clipped = np.clip(samples, -1.0, 1.0)
        if self._file is None:
            raise ValueError("the sound is closed")
        end = (self.num_samples + len(clipped)) * SAMPLE_BYTES
        while self._num_bytes < end:
            if not self._shares.take(self._tenant, _SHARE_BYTES):
                raise no_room()
            self._num_bytes += _SHARE_BYTES
        await asyncio.to_thread(self._write, self._file, clipped.tobytes())
        self.num_samples += len(clipped)
        self.levels.frombytes(self._meter.feed(samples).tobytes())
        self._growth.set()

    def _write(self, file: BinaryIO, data: bytes) -> None:
        try:
            with self._lock:
                file.seek(0, os.SEEK_END)
                file.write(data)
                file.flush()
        except OSError as error:
            raise no_room() from error
