"""Sound at another rate, by a filter whose phases are exact."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
_TAPS = 32
"""Taps of the filter at the lower of the two rates."""
_CUTOFF = 0.97
_BETA = 9.0
"""Of Kaiser's window: 90 dB."""
_PIECE: Final = 4096


class Resampler:
    """Converts one channel to another rate, piece by piece. The result depends on no cut between pieces.

    The filter has the form and the numbers of FFmpeg's default one: a sinc of 32 taps, cut at 0.97 of the lower rate,
    in Kaiser's window of 9.

    Attributes:
        rate: Of what comes in.
    """

    def __init__(self, rate: int, new_rate: int) -> None:
        """Both rates are in Hz."""
        self.rate = rate
        divisor = math.gcd(rate, new_rate)
        self._up, self._down = new_rate // divisor, rate // divisor
        self._is_same = rate == new_rate
        factor = min(1.0, new_rate / rate * _CUTOFF)
        self._num_taps = 2 * math.ceil(_TAPS / factor / 2)
        self._filters = _filters(self._up, self._num_taps, factor)
        self._behind = self._num_taps // 2 - 1
        self._waiting: Samples = np.zeros(self._behind, np.float32)
        self._first = 0
        self._num_in, self._num_out = 0, 0

    def feed(self, samples: Samples) -> Samples:
        """The samples at the other rate that these samples [n] decide."""
        if self._is_same:
            return samples
        self._num_in += len(samples)
        self._waiting = np.concatenate([self._waiting, samples])
        return self._computed(len(self._waiting) - self._num_taps + 1 + self._first)

    def finish(self) -> Samples:
        """The rest, behind which there is silence."""
        if self._is_same:
            return np.zeros(0, np.float32)
        self._waiting = np.concatenate([self._waiting, np.zeros(self._num_taps, np.float32)])
        return self._computed(self._num_in)

    def _computed(self, end: int) -> Samples:
        """The samples that stand before place `end` of what came in."""
        num_total = max(self._num_out, -(-end * self._up // self._down))
        places = np.arange(self._num_out, num_total, dtype=np.int64) * self._down
        bases, phases = places // self._up - self._first, places % self._up
        found = [
            self._piece(bases[start : start + _PIECE], phases[start : start + _PIECE])
            for start in range(0, len(bases), _PIECE)
        ]
        self._num_out = num_total
        first = num_total * self._down // self._up
        dropped = min(first - self._first, len(self._waiting))
        self._waiting, self._first = self._waiting[dropped:], self._first + dropped
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def _piece(self, bases: NDArray[np.int64], phases: NDArray[np.int64]) -> Samples:
        windows = np.lib.stride_tricks.sliding_window_view(self._waiting, self._num_taps)
        result: Samples = np.einsum("nk,nk->n", windows[bases], self._filters[phases])
        return result


def _filters(num_phases: int, num_taps: int, factor: float) -> NDArray[np.float32]:  # [num_phases, num_taps]
    """One filter for each place between two samples, of sum 1."""
    places = np.arange(num_taps) - (num_taps // 2 - 1) - np.arange(num_phases)[:, None] / num_phases
    inside = np.clip(1.0 - (2.0 * places / num_taps) ** 2, 0.0, None)
    weights = np.sinc(places * factor) * np.i0(_BETA * np.sqrt(inside))
    filters: NDArray[np.float32] = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return filters
