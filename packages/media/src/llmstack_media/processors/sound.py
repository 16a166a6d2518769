"""Base of processors of sound in chats: a spectrogram and a limit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import CheckpointFiles, integer, refuse
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.processor import ItemProcessor
from llmstack_media.sound.log_mel import FEATURE_EXTRACTOR, LogMel, Samples
from llmstack_media.sound.power_mel import PowerMel
from llmstack_media.sound.usm_mel import UsmMel

FLOAT_BYTES = 4
_INERT: Mapping[str, tuple[object, ...]] = {"dither": (0, 0.0), "padding_side": ("right",), "padding_value": (0, 0.0)}


def read_log_mel(preprocessor: Mapping[str, Any], processor: Mapping[str, Any]) -> LogMel:
    """The spectrogram that a checkpoint's files describe.

    Args:
        preprocessor: Contents of `preprocessor_config.json`; empty where there is no such file.
        processor: Of `processor_config.json`. A `feature_extractor` inside of it comes first.

    Raises:
        ProcessorConfigError: They name another class, or an option that is not supported.
    """
    nested = processor.get("feature_extractor")
    values = nested if isinstance(nested, dict) else preprocessor
    named = values.get("feature_extractor_type")
    if named != FEATURE_EXTRACTOR:
        raise ProcessorConfigError(f"the feature extractor {str(named)[:64]} is not {FEATURE_EXTRACTOR}")
    refuse(values, _INERT)
    made = LogMel(
        integer(values, "feature_size", 80, 1, 512),
        integer(values, "sampling_rate", 16_000, 8000, 192_000),
        integer(values, "chunk_length", 30, 1, 600),
        integer(values, "hop_length", 160, 1, 65_536),
        integer(values, "n_fft", 400, 2, 65_536),
    )
    if made.num_samples % made.hop:
        raise ProcessorConfigError(f"hop_length {made.hop} does not divide a window of {made.num_samples} samples")
    return made


@dataclass(frozen=True, kw_only=True)
class SoundProcessor(ItemProcessor[ImageLayout]):
    """Preprocessing of sound of one model family.

    The grid of a layout is (frames), and an array has the shape [bins, frames, 4]: the bytes of float32.

    Attributes:
        log_mel: The spectrogram of a window, or of sound of any length.
        max_s: Seconds of one item. Longer sound is refused, of which the reference would drop the end.
    """

    has_images: ClassVar[bool] = False
    """Whether models of the family take pictures too."""

    log_mel: LogMel | PowerMel | UsmMel
    max_s: float

    @classmethod
    def is_taken(cls, files: CheckpointFiles) -> bool:
        """Whether the checkpoint takes sound; in some families only some sizes do."""
        return True

    @classmethod
    @abstractmethod
    def of_checkpoint(cls, files: CheckpointFiles) -> Self:
        """The processor of a checkpoint.

        Raises:
            ProcessorConfigError: Its files ask for something else than this family does.
        """

    @property
    def sample_rate(self) -> int:
        """Samples per second of what is prepared, in Hz."""
        return self.log_mel.sample_rate

    def largest(self) -> ImageLayout:
        return self.layout(int(self.max_s * self.sample_rate))

    @abstractmethod
    def layout(self, num_samples: int) -> ImageLayout:
        """The layout of so many samples, at most `max_s` of them."""

    @abstractmethod
    def prepare(self, samples: Samples) -> NDArray[np.uint8]:
        """The array that the encoder reads, of the layout's shape. `samples`: [num_samples], from -1 to 1."""


def as_bytes(frames: NDArray[np.float32]) -> NDArray[np.uint8]:
    """A spectrogram [bins, frames] as bytes [bins, frames, 4]."""
    return np.ascontiguousarray(frames).view(np.uint8).reshape(*frames.shape, FLOAT_BYTES)
