"""Log-mel spectrograms of sound of any length, as Granite Speech reads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llmstack_media.sound.log_mel import Samples
from llmstack_media.sound.usm_mel import htk_filters

FEATURE_EXTRACTOR: Final = "GraniteSpeechFeatureExtractor"
_FLOOR: Final = 1e-10
_RANGE: Final = 8.0
"""Powers of ten below the loudest value that are kept."""
_FRAMES_AT_ONCE = 1000
"""Memory beside the result does not grow with the length."""


@dataclass(frozen=True)
class PowerMel:
    """Equal to transformers' `GraniteSpeechFeatureExtractor` for one sound, in numpy.

    Attributes:
        num_bins: Mel bins.
        sample_rate: Samples per second, in Hz.
        frame_size: Samples of a frame.
        hop: Samples from one frame to the next.
        fft_size: Samples that each frame is padded to on both sides.
    """

    num_bins: int = 80
    sample_rate: int = 16_000
    frame_size: int = 400
    hop: int = 160
    fft_size: int = 512

    def num_frames(self, num_samples: int) -> int:
        """Frames around every `hop`-th sample, without the last one where their number is odd."""
        return (num_samples // self.hop + 1) // 2 * 2

    def compute(self, samples: Samples) -> NDArray[np.float32]:  # [num_frames, num_bins]
        """The spectrogram of a sound of more samples than half of `fft_size`, in float64 until its end."""
        padded = np.pad(samples.astype(np.float64), self.fft_size // 2, mode="reflect")
        count = len(samples) // self.hop + 1
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.fft_size)[:: self.hop][:count]
        mel = np.empty((count, self.num_bins))
        for start in range(0, count, _FRAMES_AT_ONCE):
            part = slice(start, start + _FRAMES_AT_ONCE)
            power = np.abs(np.fft.rfft(frames[part] * self._hann, axis=-1)) ** 2
            np.log10(np.maximum(power @ self._filters, _FLOOR), out=mel[part])
        mel = np.maximum(mel, mel.max() - _RANGE) / 4.0 + 1.0
        return np.ascontiguousarray(mel[: self.num_frames(len(samples))], dtype=np.float32)

    @cached_property
    def _hann(self) -> NDArray[np.float64]:
        """The window of a frame in the middle of zeros."""
        before = (self.fft_size - self.frame_size) // 2
        hann = np.zeros(self.fft_size)
        hann[before : before + self.frame_size] = np.hanning(self.frame_size + 1)[:-1]
        return hann

    @cached_property
    def _filters(self) -> NDArray[np.float64]:
        return htk_filters(self.num_bins, self.sample_rate, self.fft_size, 0.0, self.sample_rate / 2)
