"""A decoded file of sound, of which windows are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Sound(Protocol):
    """One channel at the model's rate, which takes no memory. `llmstack_media.audio.files.Sound` is one."""

    @property
    def rate(self) -> int:
        """Samples in each second, in Hz."""
        ...

    @property
    def num_samples(self) -> int:
        """Of the whole file."""
        ...

    @property
    def level_samples(self) -> int:
        """Samples for which there is one level."""
        ...

    @property
    def levels(self) -> Sequence[float]:
        """The root of the mean square of each so many samples, from 0 to 1."""
        ...

    @property
    def duration_s(self) -> float:
        """Seconds of the whole file."""
        ...

    async def read(self, start: int, stop: int) -> Any:
        """The samples from `start` up to `stop`: an array of float32 from -1 to 1."""
        ...

    def close(self) -> None:
        """Frees its room. Idempotent."""
        ...
