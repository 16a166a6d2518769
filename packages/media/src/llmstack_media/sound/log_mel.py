"""Log-mel spectrograms of windows of speech, as Whisper's encoders read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
"""[num_samples] of one channel, from -1 to 1."""
FEATURE_EXTRACTOR: Final = "WhisperFeatureExtractor"
_FLOOR = 1e-10
_FRAMES_AT_ONCE = 3000
"""Frames of half a minute: memory beside the result does not grow with the length."""
_RANGE = 8.0
"""Powers of ten below the loudest value of a window that are kept."""
_MEL_BREAK_HZ, _MEL_BREAK, _HZ_PER_MEL = 1000.0, 15.0, 200.0 / 3.0
_LOG_STEP = np.log(6.4) / 27.0
"""Slaney's scale: 200/3 Hz per mel up to 1 kHz, then 27 mel for each factor of 6.4."""


@dataclass(frozen=True)
class LogMel:
    """Preprocessing of windows of one length, equal to transformers' `WhisperFeatureExtractor` in numpy.

    Attributes:
        num_bins: Mel bins.
        sample_rate: Samples per second, in Hz.
        window_s: Seconds of a window; shorter sound is padded with silence.
        hop: Samples from one frame to the next.
        fft_size: Samples of a frame.
    """

    num_bins: int = 80
    sample_rate: int = 16_000
    window_s: int = 30
    hop: int = 160
    fft_size: int = 400

    @property
    def num_samples(self) -> int:
        """Samples of a window."""
        return self.window_s * self.sample_rate

    @property
    def num_frames(self) -> int:
        """Frames of a window."""
        return self.num_samples // self.hop

    def shortened(self, num_samples: int) -> LogMel:
        """The same preprocessing of a shorter window, of the whole seconds in which so many samples are."""
        return replace(self, window_s=min(self.window_s, max(1, -(-num_samples // self.sample_rate))))

    @property
    def num_bytes(self) -> int:
        """Bytes of what `compute` returns."""
        return self.num_bins * self.num_frames * 4

    def identity(self) -> tuple[tuple[str, str], ...]:
        """Name and options: two with the same one make the same array of a window."""
        sizes = (self.num_bins, self.sample_rate, self.window_s, self.hop, self.fft_size)
        return (("name", FEATURE_EXTRACTOR), ("sizes", repr(sizes)))

    def compute(self, samples: Samples) -> NDArray[np.float32]:  # [num_bins, num_frames]
        """The spectrogram of at most `num_samples` samples, in float64 until its end.

        Frames behind the sound are silence and cost nothing.
        """
        padded = self._padded(samples)
        num_sounding = min(self.num_frames, -(-(len(samples) + self.fft_size // 2) // self.hop))
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.fft_size)[:: self.hop][:num_sounding]
        mel = np.full((self.num_frames, self.num_bins), np.log10(_FLOOR))
        for start in range(0, num_sounding, _FRAMES_AT_ONCE):
            part = slice(start, min(start + _FRAMES_AT_ONCE, num_sounding))
            power = np.abs(np.fft.rfft(frames[part] * self._hann, axis=1)) ** 2
            np.log10(np.maximum(power @ self._filters, _FLOOR), out=mel[part])
        mel = (np.maximum(mel, mel.max() - _RANGE) + 4.0) / 4.0
        return np.ascontiguousarray(mel.T, dtype=np.float32)

    def _padded(self, samples: Samples) -> NDArray[np.float64]:
        """A whole window with half a frame of its own reflection at either end."""
        if len(samples) > self.num_samples:
            raise ValueError(f"{len(samples)} samples are more than a window of {self.num_samples}")
        window = np.zeros(self.num_samples)
        window[: len(samples)] = samples
        return np.pad(window, self.fft_size // 2, mode="reflect")

    @cached_property
    def _hann(self) -> NDArray[np.float64]:
        return np.hanning(self.fft_size + 1)[:-1].astype(np.float64)

    @cached_property
    def _filters(self) -> NDArray[np.float64]:  # [fft_size // 2 + 1, num_bins]
        """Triangles on Slaney's mel scale up to 8 kHz, each of the same area."""
        edges = _mel_to_hz(np.linspace(0.0, _hz_to_mel(8000.0), self.num_bins + 2))
        bins = np.linspace(0, self.sample_rate // 2, self.fft_size // 2 + 1)
        rising = (bins[:, None] - edges[:-2]) / np.diff(edges)[:-1]
        falling = (edges[2:] - bins[:, None]) / np.diff(edges)[1:]
        triangles = np.maximum(0.0, np.minimum(rising, falling))
        filters: NDArray[np.float64] = triangles * (2.0 / (edges[2:] - edges[:-2]))
        return filters


def _hz_to_mel(hz: float) -> float:
    if hz < _MEL_BREAK_HZ:
        return hz / _HZ_PER_MEL
    return float(_MEL_BREAK + np.log(hz / _MEL_BREAK_HZ) / _LOG_STEP)


def _mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _MEL_BREAK_HZ * np.exp(_LOG_STEP * (mel - _MEL_BREAK))
    hz: NDArray[np.float64] = np.where(mel < _MEL_BREAK, mel * _HZ_PER_MEL, above)
    return hz
