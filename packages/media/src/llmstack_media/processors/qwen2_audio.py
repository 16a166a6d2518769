"""Qwen2-Audio: at most one window, without the silence behind its sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.processors.config_values import CheckpointFiles
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.sound import FLOAT_BYTES, SoundProcessor, as_bytes, read_log_mel
from llmstack_media.sound.log_mel import LogMel, Samples

_STRIDE = 2
"""Frames of each state of the encoder, and states of each vector."""


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioProcessor(SoundProcessor):
    """Equal to transformers' class for sound up to one window.

    States behind the sound are seen by no other and become no vector, so they are left out. The last state that is
    kept reads one frame behind its own two.
    """

    name: ClassVar[str] = "Qwen2AudioProcessor"
    NUMBER: ClassVar[str] = "Audio {number}: "
    """Before an item in a text."""

    log_mel: LogMel

    @classmethod
    def of_checkpoint(cls, files: CheckpointFiles) -> Self:
        log_mel = read_log_mel(files.preprocessor, files.processor)
        return cls(
            log_mel=log_mel, max_s=float(log_mel.window_s), token=files.token("audio_token", "<|AUDIO|>"),
            around=(f"{cls.NUMBER}{files.token('audio_bos_token', '<|audio_bos|>')}",
                    files.token("audio_eos_token", "<|audio_eos|>")),
        )  # fmt: skip

    def layout(self, num_samples: int) -> ImageLayout:
        num_states = -(-self._num_sounding(num_samples) // _STRIDE)
        num_frames = min(_STRIDE * num_states + 1, self.log_mel.num_frames)
        shape = (self.log_mel.num_bins, num_frames, FLOAT_BYTES)
        return ImageLayout(shape, (num_frames,), num_states, num_states // _STRIDE)

    def prepare(self, samples: Samples) -> NDArray[np.uint8]:
        (num_frames,) = self.layout(len(samples)).grid
        return as_bytes(self.log_mel.compute(samples)[:, :num_frames])

    def _num_sounding(self, num_samples: int) -> int:
        """Frames that begin in the sound."""
        return -(-num_samples // self.log_mel.hop)
