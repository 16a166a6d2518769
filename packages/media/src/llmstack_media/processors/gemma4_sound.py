"""Sound of Gemma 4: the frames that are all sound, four of them to each vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import CheckpointFiles, integer, number, refuse
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.sound import FLOAT_BYTES, SoundProcessor, as_bytes
from llmstack_media.sound.log_mel import Samples
from llmstack_media.sound.usm_mel import FEATURE_EXTRACTOR, UsmMel

_MAX_S: Final = 30.0
"""Of a sound: the reference drops what is behind it."""
_STRIDE: Final = 4
"""Frames of each vector."""
_INERT: Mapping[str, tuple[object, ...]] = {
    "dither": (0, 0.0), "preemphasis": (0, 0.0), "input_scale_factor": (1, 1.0), "fft_overdrive": (False,),
    "per_bin_mean": (), "per_bin_stddev": (), "padding_side": ("right",), "padding_value": (0, 0.0),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gemma4SoundProcessor(SoundProcessor):
    """Frames that end behind the sound become no vector, and no other one sees them: they are left out."""

    name: ClassVar[str] = "Gemma4SoundProcessor"
    has_images: ClassVar[bool] = True

    log_mel: UsmMel

    @classmethod
    def is_taken(cls, files: CheckpointFiles) -> bool:
        """The larger sizes have no encoder of sound."""
        return isinstance(files.model.get("audio_config"), Mapping)

    @classmethod
    def of_checkpoint(cls, files: CheckpointFiles) -> Self:
        return cls(
            log_mel=_read(files), max_s=_MAX_S, begin_token=files.token("boa_token", "<|audio>"),
            token=files.token("audio_token", "<|audio|>"), end_token=files.token("eoa_token", "<audio|>"),
        )  # fmt: skip

    def layout(self, num_samples: int) -> ImageLayout:
        num_frames = self.log_mel.num_frames(num_samples)
        num_vectors = -(-num_frames // _STRIDE)
        shape = (self.log_mel.num_bins, num_frames, FLOAT_BYTES)
        return ImageLayout(shape, (num_frames,), num_vectors, num_vectors)

    def prepare(self, samples: Samples) -> NDArray[np.uint8]:
        return as_bytes(np.ascontiguousarray(self.log_mel.compute(samples).T))


def _read(files: CheckpointFiles) -> UsmMel:
    nested = files.processor.get("feature_extractor")
    values: Mapping[str, Any] = nested if isinstance(nested, dict) else files.preprocessor
    named = values.get("feature_extractor_type", FEATURE_EXTRACTOR)
    if named != FEATURE_EXTRACTOR:
        raise ProcessorConfigError(f"the feature extractor {str(named)[:64]} is not {FEATURE_EXTRACTOR}")
    refuse(values, _INERT)
    rate = integer(values, "sampling_rate", 16_000, 8000, 192_000)
    lengths = (
        round(rate * number(values, name, default) / 1000)
        for name, default in (("frame_length_ms", 20.0), ("hop_length_ms", 10.0))
    )
    frame_size, hop = (max(1, min(length, 65_536)) for length in lengths)
    low = float(values.get("min_frequency") or 0.0)
    return UsmMel(
        integer(values, "feature_size", 128, 1, 512), rate, frame_size, hop, low,
        number(values, "max_frequency", 8000.0), number(values, "mel_floor", 1e-3),
    )  # fmt: skip
