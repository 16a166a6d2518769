"""Base of processors of videos: the choice of frames, and their limit."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.clips import Clip
from llmstack_media.decode.pictures import Pixels
from llmstack_media.processors.config_values import CheckpointFiles
from llmstack_media.processors.layout import VideoLayout
from llmstack_media.processors.processor import PixelProcessor

LIST_FPS = 1.0
"""Frames per second of a list that does not say it, as in vLLM."""
DEFAULT_FRAMES = 32
"""Of an animated picture, where neither the checkpoint nor anyone else says how many; as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class VideoProcessor(PixelProcessor[VideoLayout]):
    """Preprocessing of the frames of one model family.

    Attributes:
        num_frames: Frames to take at most; 0 if it is not said.
        fps: Frames to take of a second; of a list, those that it has of one. 0 if it is not said.
        max_vectors: Of one video. Larger ones are refused.
    """

    options: ClassVar[tuple[str, ...]] = ("num_frames", "fps", "min_pixels", "max_pixels")

    num_frames: int
    fps: float
    max_vectors: int

    @classmethod
    @abstractmethod
    def of_checkpoint(cls, files: CheckpointFiles, max_vectors: int) -> Self:
        """The processor of a checkpoint.

        Raises:
            ProcessorConfigError: Its files ask for something else than this family does.
        """

    @abstractmethod
    def layout(self, clip: Clip) -> VideoLayout:
        """The layout of a video.

        Raises:
            InvalidRequestError: It cannot become anything, or has too many vectors.
        """

    @abstractmethod
    def prepare(self, frames: Iterable[Pixels], layout: VideoLayout) -> NDArray[np.uint8]:
        """The array that the encoder reads. `frames`: Those of the layout in order, which are not kept."""

    def rate(self, clip: Clip) -> float:
        """Frames per second of the whole video."""
        return (self.fps or LIST_FPS) if clip.is_list else clip.num_frames / clip.seconds
