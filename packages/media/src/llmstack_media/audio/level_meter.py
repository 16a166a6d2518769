"""Levels of sound: how loud each piece of 20 ms is."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_LEVEL_S: Final = 0.02


def num_level_samples(rate: int) -> int:
    """Samples for which there is one level."""
    return round(_LEVEL_S * rate)


class LevelMeter:
    """The levels of sound that comes in parts, which do not depend on the parts."""

    def __init__(self, rate: int) -> None:
        """`rate`: Of the samples, in Hz."""
        self._num_samples = num_level_samples(rate)
        self._waiting = np.zeros(0, np.float32)

    def feed(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The levels that these samples [n] complete, each the root of the mean square of a piece."""
        self._waiting = np.concatenate([self._waiting, samples])
        whole = len(self._waiting) - len(self._waiting) % self._num_samples
        levels = _levels(self._waiting[:whole], self._num_samples)
        self._waiting = self._waiting[whole:]
        return levels

    def finish(self) -> NDArray[np.float32]:
        """The level of the rest; none where there is no rest."""
        return _levels(self._waiting, max(1, len(self._waiting)))


def _levels(samples: NDArray[np.float32], num_samples: int) -> NDArray[np.float32]:
    levels: NDArray[np.float32] = np.sqrt(np.square(samples.reshape(-1, num_samples)).mean(axis=1))
    return levels
