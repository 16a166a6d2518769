"""Voxtral: windows of sound, the last filled up with silence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import CheckpointFiles
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.sound import FLOAT_BYTES, SoundProcessor, as_bytes, read_log_mel
from llmstack_media.sound.log_mel import LogMel, Samples

_MAX_WINDOWS = 60
"""Half an hour of 30 seconds each, for which the model is meant."""
_BEGIN = "[BEGIN_AUDIO]"
_STRIDE, _JOINED = 2, 4
"""Frames of each state of the encoder, and states of each vector."""


@dataclass(frozen=True, kw_only=True)
class VoxtralProcessor(SoundProcessor):
    """Equal to transformers' class: one spectrogram of all windows, in which the loudest value is that of all."""

    name: ClassVar[str] = "VoxtralProcessor"

    log_mel: LogMel

    @classmethod
    def of_checkpoint(cls, files: CheckpointFiles) -> Self:
        log_mel = read_log_mel(files.preprocessor, files.processor)
        if log_mel.num_frames % (_STRIDE * _JOINED):
            raise ProcessorConfigError(f"a window of {log_mel.num_frames} frames has no whole number of vectors")
        return cls(
            log_mel=log_mel, max_s=float(_MAX_WINDOWS * log_mel.window_s),
            token=files.token("audio_token", "[AUDIO]"),
            around=(_BEGIN, ""),
        )  # fmt: skip

    def layout(self, num_samples: int) -> ImageLayout:
        num_frames = self._num_windows(num_samples) * self.log_mel.num_frames
        num_states = num_frames // _STRIDE
        shape = (self.log_mel.num_bins, num_frames, FLOAT_BYTES)
        return ImageLayout(shape, (num_frames,), num_states, num_states // _JOINED)

    def prepare(self, samples: Samples) -> NDArray[np.uint8]:
        whole = replace(self.log_mel, window_s=self._num_windows(len(samples)) * self.log_mel.window_s)
        return as_bytes(whole.compute(samples))

    def _num_windows(self, num_samples: int) -> int:
        return max(1, -(-num_samples // self.log_mel.num_samples))
