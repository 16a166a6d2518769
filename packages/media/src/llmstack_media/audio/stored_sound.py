"""Sound in a file without a name, which is read while its request runs."""

from __future__ import annotations

import asyncio
import threading
from array import array
from typing import BinaryIO, Final

import numpy as np

from llmstack_media.audio.level_meter import num_level_samples
from llmstack_media.shares import Shares
from llmstack_media.sound.samples import Samples

SAMPLE_BYTES: Final = 4
"""Bytes of a sample in the file: a float32."""


class StoredSound:
    """One channel at the model's rate, which takes room on a disk and not in memory. Used by one event loop.

    Attributes:
        rate: Samples per second, in Hz.
        num_samples: Samples in the file, so far.
        level_samples: Samples for which there is one level.
        levels: The root of the mean square of each so many samples.
    """

    def __init__(self, file: BinaryIO, rate: int, shares: Shares, tenant: str) -> None:
        """`file` is this object's. `shares`: Of the disk, in bytes."""
        self.rate = rate
        self.num_samples = 0
        self.level_samples = num_level_samples(rate)
        self.levels = array("f")
        self._file: BinaryIO | None = file
        self._shares = shares
        self._tenant = tenant
        self._num_bytes = 0
        self._lock = threading.Lock()  # of the place in the file

    @property
    def duration_s(self) -> float:
        """Seconds of all samples."""
        return self.num_samples / self.rate

    async def read(self, start: int, stop: int) -> Samples:
        """The samples from `start` up to `stop`, or to the last one, from -1 to 1; raises ValueError where closed."""
        if self._file is None:
            raise ValueError("the sound is closed")
        size = max(0, min(stop, self.num_samples) - start) * SAMPLE_BYTES
        return np.frombuffer(await asyncio.to_thread(self._read, self._file, start * SAMPLE_BYTES, size), np.float32)

    def _read(self, file: BinaryIO, start: int, size: int) -> bytes:
        # Of the object and not of its descriptor: where it is closed meanwhile, that is another file's.
        with self._lock:
            file.seek(start)
            return file.read(size)

    def close(self) -> None:
        """Frees its room. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
            self._shares.add(self._tenant, -self._num_bytes)

    def __del__(self) -> None:
        self.close()
