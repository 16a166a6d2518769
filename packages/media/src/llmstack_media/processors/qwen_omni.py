"""Sound of Qwen2.5-Omni: the frames that begin in the sound, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.qwen2_audio import Qwen2AudioProcessor
from llmstack_media.processors.sound import FLOAT_BYTES


@dataclass(frozen=True, kw_only=True)
class Qwen2_5OmniProcessor(Qwen2AudioProcessor):
    """Equal to transformers' class for sound up to the length that the checkpoint's files say."""

    name: ClassVar[str] = "Qwen2_5OmniProcessor"
    has_images: ClassVar[bool] = True
    NUMBER: ClassVar[str] = ""

    def layout(self, num_samples: int) -> ImageLayout:
        num_frames = self._num_sounding(num_samples)
        num_states = -(-num_frames // 2)
        shape = (self.log_mel.num_bins, num_frames, FLOAT_BYTES)
        return ImageLayout(shape, (num_frames,), num_states, num_states // 2)
