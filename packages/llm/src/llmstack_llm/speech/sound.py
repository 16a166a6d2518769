"""Sound of which windows are read: a decoded file, or one that still grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sound(Protocol):
    """One channel at the model's rate, which takes no memory. `llmstack_media.audio.files.Sound` is one."""

    @property
    def rate(self) -> int:
        """Samples in each second, in Hz."""
        ...

    @property
    def num_samples(self) -> int:
        """The samples of the whole file."""
        ...

    @property
    def level_samples(self) -> int:
        """The number of samples for each level."""
        ...

    @property
    def levels(self) -> Sequence[float]:
        """The root of the mean square of each so many samples, from 0 to 1."""
        ...

    @property
    def duration_s(self) -> float:
        """Seconds of the whole file."""
        ...

    async def read(self, start: int, stop: int) -> object:
        """The samples from `start` up to `stop`: an array of float32 from -1 to 1."""
        ...

    def close(self) -> None:
        """Frees its room. Idempotent."""
        ...


class LiveSound(Sound, Protocol):
    """Sound that grows until it ends. `llmstack_media.audio.live_sound.LiveSound` is one."""

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more."""
        ...

    async def add(self, data: bytes) -> None:
        """Adds samples: integers of 16 bits, little-endian, at the rate that it was made for.

        Raises:
            InvalidRequestError: They end within a sample, or are too many; nothing was added.
            ServerOverloadedError: There is no room for them.
        """
        ...

    async def end(self) -> None:
        """Ends the sound. Idempotent."""
        ...

    async def wait_for_growth(self, num_samples: int) -> None:
        """Returns once it has more samples than `num_samples`, or has ended."""
        ...
