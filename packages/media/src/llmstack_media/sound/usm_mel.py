"""Log-mel spectrograms of sound of any length, as Gemma 4 reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmstack_media.sound.log_mel import Samples

FEATURE_EXTRACTOR: Final = "Gemma4AudioFeatureExtractor"
_FRAMES_AT_ONCE = 1000
"""Memory beside the result does not grow with the length."""


@dataclass(frozen=True)
class UsmMel:
    """Equal to transformers' `Gemma4AudioFeatureExtractor` for one sound, in numpy and in its types.

    Attributes:
        num_bins: Mel bins.
        sample_rate: Samples per second, in Hz.
        frame_size: Samples of a frame.
        hop: Samples from one frame to the next.
        min_hz: Of the lowest bin.
        max_hz: Of the highest bin.
        floor: What is added to each value before its logarithm.
    """

    num_bins: int = 128
    sample_rate: int = 16_000
    frame_size: int = 320
    hop: int = 160
    min_hz: float = 0.0
    max_hz: float = 8000.0
    floor: float = 1e-3

    def num_frames(self, num_samples: int) -> int:
        """Frames of which the sound has all samples, and the one behind them, after half a frame of silence."""
        return max(0, -(-(num_samples - self.frame_size // 2) // self.hop))

    def compute(self, samples: Samples) -> NDArray[np.float32]:  # [num_frames, num_bins]
        """The spectrogram of a sound."""
        num_frames = self.num_frames(len(samples))
        padded = np.pad(samples, (self.frame_size // 2, 0))
        mel = np.empty((num_frames, self.num_bins), np.float32)
        if not num_frames:
            return mel
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.frame_size)[:: self.hop][:num_frames]
        for start in range(0, num_frames, _FRAMES_AT_ONCE):
            part = slice(start, start + _FRAMES_AT_ONCE)
            spectrum = np.fft.rfft(frames[part] * self._hann, n=self._fft_size, axis=-1)
            mel[part] = np.log(np.matmul(np.abs(spectrum), self._filters) + self.floor)
        return mel

    @property
    def _fft_size(self) -> int:
        return int(2 ** math.ceil(math.log2(self.frame_size)))

    @cached_property
    def _hann(self) -> NDArray[np.float32]:
        return np.hanning(self.frame_size + 1)[:-1].astype(np.float32)

    @cached_property
    def _filters(self) -> NDArray[np.float64]:
        return htk_filters(self.num_bins, self.sample_rate, self._fft_size, self.min_hz, self.max_hz)


def htk_filters(
    num_bins: int, sample_rate: int, fft_size: int, min_hz: float, max_hz: float
) -> NDArray[np.float64]:  # [fft_size // 2 + 1, num_bins]
    """Triangles of equal height on the mel scale of HTK."""
    low, high = (2595.0 * np.log10(1.0 + hz / 700.0) for hz in (min_hz, max_hz))
    edges = 700.0 * (np.power(10, np.linspace(low, high, num_bins + 2) / 2595.0) - 1.0)
    slopes = edges[None] - np.linspace(0, sample_rate // 2, fft_size // 2 + 1)[:, None]
    rising, falling = -slopes[:, :-2] / np.diff(edges)[:-1], slopes[:, 2:] / np.diff(edges)[1:]
    filters: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return filters
