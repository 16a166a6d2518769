"""Sound of Granite Speech: frames by twos, and some vectors for each window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import CheckpointFiles, integer, refuse
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.sound import FLOAT_BYTES, SoundProcessor, as_bytes
from llmstack_media.sound.log_mel import Samples
from llmstack_media.sound.power_mel import FEATURE_EXTRACTOR, PowerMel

_MAX_S: Final = 120.0
"""Of a sound. The reference has no limit; an encoder's memory has."""
_JOINED: Final = 2
"""Frames of each state of the encoder, one after the other."""
_INERT: Mapping[str, tuple[object, ...]] = {"padding_side": ("right",), "padding_value": (0, 0.0)}


@dataclass(frozen=True, kw_only=True)
class GraniteSpeechProcessor(SoundProcessor):
    """Each sound has a spectrogram of its own. The reference pads sounds of a batch, whose vectors differ then.

    Attributes:
        window_size: States of each window of the projector.
        window_vectors: Vectors of each window.
    """

    name: ClassVar[str] = "GraniteSpeechProcessor"

    log_mel: PowerMel
    window_size: int
    window_vectors: int

    @classmethod
    def of_checkpoint(cls, files: CheckpointFiles) -> Self:
        nested = (files.processor.get(name) for name in ("audio_processor", "feature_extractor"))
        values: Mapping[str, Any] = next((one for one in nested if isinstance(one, dict)), files.preprocessor)
        window = integer(values, "projector_window_size", 15, 1, 4096)
        rate = integer(values, "projector_downsample_rate", 5, 1, window)
        own = (integer(files.model, "window_size", 15), integer(files.model, "downsample_rate", 5))
        if (window, rate) != own or window % rate:
            raise ProcessorConfigError(
                f"windows of {window} states with a vector for {rate} of them are not the model's, or not whole"
            )
        return cls(
            log_mel=_read(values), max_s=_MAX_S, token=files.token("audio_token", "<|audio|>"),
            window_size=window, window_vectors=window // rate,
        )  # fmt: skip

    def layout(self, num_samples: int) -> ImageLayout:
        num_states = self.log_mel.num_frames(num_samples) // _JOINED
        num_vectors = -(-num_states // self.window_size) * self.window_vectors
        shape = (_JOINED * self.log_mel.num_bins, num_states, FLOAT_BYTES)
        return ImageLayout(shape, (num_states,), num_states, num_vectors)

    def prepare(self, samples: Samples) -> NDArray[np.uint8]:
        frames = self.log_mel.compute(samples)
        return as_bytes(np.ascontiguousarray(frames.reshape(len(frames) // _JOINED, -1).T))


def _read(values: Mapping[str, Any]) -> PowerMel:
    named = values.get("feature_extractor_type", FEATURE_EXTRACTOR)
    if named != FEATURE_EXTRACTOR:
        raise ProcessorConfigError(f"the feature extractor {str(named)[:64]} is not {FEATURE_EXTRACTOR}")
    refuse(values, _INERT)
    size = "n_mels" if values.get("feature_size") is None else "feature_size"
    made = PowerMel(
        integer(values, size, 80, 1, 512), integer(values, "sampling_rate", 16_000, 8000, 192_000),
        integer(values, "win_length", 400, 2, 65_536), integer(values, "hop_length", 160, 1, 65_536),
        integer(values, "n_fft", 512, 2, 65_536),
    )  # fmt: skip
    if made.frame_size > made.fft_size:
        raise ProcessorConfigError(f"win_length {made.frame_size} is longer than n_fft {made.fft_size}")
    given, own = values.get("melspec_kwargs"), (made.sample_rate, made.fft_size, made.frame_size, made.hop)
    sizes = dict(zip(("sample_rate", "n_fft", "win_length", "hop_length"), own, strict=True))
    if isinstance(given, Mapping) and any(given.get(name, size) != size for name, size in sizes.items()):
        raise ProcessorConfigError("melspec_kwargs, which the reference does not read, differ from the other options")
    return made
