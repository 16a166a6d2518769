"""LLaVA-OneVision: as LLaVA-NeXT, with tiles made smaller where they are many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.clips import Clip
from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError, too_many_vectors
from llmstack_media.limits import MAX_VIDEO_FRAMES
from llmstack_media.processors.config_values import (
    MAX_SIDE,
    CheckpointFiles,
    boolean,
    checked_integer,
    integer,
    number,
)
from llmstack_media.processors.fixed_size import fixed_size
from llmstack_media.processors.layout import ImageLayout, VideoLayout
from llmstack_media.processors.llava_next import LlavaNextImageProcessor, grids_of
from llmstack_media.processors.processor import BICUBIC, CLIP_MEAN, CLIP_STD, INERT, channels_first
from llmstack_media.processors.video import DEFAULT_FRAMES, VideoProcessor

_KIND = "anyres_max_"
_MAX_TILES_PER_SIDE = 6
_LEAST_RATIO = 1.1
"""Up to here patches are not made fewer."""


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionImageProcessor(LlavaNextImageProcessor):
    """Cuts each of several pictures into tiles, as the reference does with a flat list of them.

    Attributes:
        max_tiles: As many tiles of patches are kept of a picture beside the whole of it; more are made fewer.
    """

    name: ClassVar[str] = "LlavaOnevisionImageProcessor"
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = {**INERT, "do_pad": (True,)}

    max_tiles: int

    @classmethod
    def from_checkpoint(cls, files: CheckpointFiles) -> Self:
        height, width = fixed_size(files, 384)
        if height != width:
            raise ProcessorConfigError("size must be a square")
        sides = [height * count for count in range(1, _MAX_TILES_PER_SIDE + 1)]
        every = [[rows, columns] for rows in sides for columns in sides]
        patch_size = files.encoder_patch_size()
        num_vectors = integer(files.processor, "num_image_tokens", (height // patch_size) ** 2)
        is_whole = files.processor.get("vision_feature_select_strategy", "full") == "full"
        if num_vectors != (height // patch_size) ** 2 or not is_whole:
            raise ProcessorConfigError("num_image_tokens must be all patches of a tile")
        return cls(
            **cls._common(files.image),
            side=checked_integer("size", height, 1, MAX_SIDE),
            grids=grids_of(files.image.get("image_grid_pinpoints") or every, height),
            patch_size=patch_size,
            num_additional=0,
            token=files.token("image_token", "<image>"),
            max_tiles=_max_tiles(files),
        )

    def largest(self) -> ImageLayout:
        """The most tiles, and the most vectors that a picture in any grid can have, or a few more."""
        widest = max(self.grids, key=lambda grid: grid[0] * grid[1])
        most = max(self._most_vectors(*grid) for grid in self.grids)
        return replace(self.layout(widest[1], widest[0]), num_vectors=most)

    def _most_vectors(self, height: int, width: int) -> int:
        per_side = self.side // self.patch_size
        rows, columns = (per_side * (length // self.side) for length in (height, width))
        kept = math.floor(_LEAST_RATIO**2 * self.max_tiles * per_side**2)
        return min(rows * columns, kept) + rows + per_side**2

    def _num_vectors(self, height: int, width: int) -> int:
        per_side = self.side // self.patch_size
        top, left = self.borders(height, width)
        rows, columns = (per_side * (length // self.side) for length in self.best_grid(height, width))
        rows, columns = rows - 2 * top, columns - 2 * left
        ratio = math.sqrt(rows * columns / (self.max_tiles * per_side**2))
        if ratio > _LEAST_RATIO:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows + per_side**2


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionVideoProcessor(VideoProcessor):
    """Frames of one size, whose vectors are joined by fours. The grid is (frames, rows, columns of patches).

    Attributes:
        side: Of a frame, in pixels.
        patch_size: Of the encoder.
    """

    name: ClassVar[str] = "LlavaOnevisionVideoProcessor"
    options: ClassVar[tuple[str, ...]] = ("num_frames", "fps")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = LlavaOnevisionImageProcessor.INERT

    side: int
    patch_size: int

    @classmethod
    def of_checkpoint(cls, files: CheckpointFiles, max_vectors: int) -> Self:
        values = files.video
        height, width = fixed_size(files, 384, values)
        if height != width:
            raise ProcessorConfigError("size of a frame must be a square")
        is_chosen = boolean(values, "do_sample_frames", False)
        num_frames = integer(values, "num_frames", 0, 0, MAX_VIDEO_FRAMES) if is_chosen else 0
        return cls(
            **cls._common(values),
            num_frames=num_frames,
            fps=number(values, "fps", 1.0) if is_chosen and not num_frames and values.get("fps") else 0.0,
            max_vectors=max_vectors,
            side=height,
            patch_size=files.encoder_patch_size(),
            token=files.token("video_token", "<video>"),
        )

    def layout(self, clip: Clip) -> VideoLayout:
        found = self._layout(self._choose(clip), self.rate(clip))
        if found.num_vectors > self.max_vectors:
            raise too_many_vectors(found.num_vectors, self.max_vectors)
        return found

    def largest(self) -> VideoLayout:
        most = max(1, min((self.max_vectors - 1) // self._vectors_of_frame, MAX_VIDEO_FRAMES))
        return self._layout(range(most), 1.0)

    def prepare(self, frames: Iterable[Pixels], layout: VideoLayout) -> NDArray[np.uint8]:
        return channels_first([self._resized(frame, self.side, self.side) for frame in frames])

    @property
    def _vectors_of_frame(self) -> int:
        return math.ceil(self.side // self.patch_size / 2) ** 2

    def _choose(self, clip: Clip) -> Sequence[int]:
        """The frames: all of a list, unless their number is limited; else evenly, by transformers' arithmetic."""
        total = clip.num_frames
        count = float(total)
        if self.fps and not clip.is_list:
            count = min(max(total / self.rate(clip) * self.fps, 1.0), total)
        limit = self.num_frames or (MAX_VIDEO_FRAMES if self.fps or clip.is_list else DEFAULT_FRAMES)
        count = min(int(count), limit)
        return [int(index) for index in np.arange(0, total, total / count).astype(np.float32)]

    def _layout(self, frames: Sequence[int], rate: float) -> VideoLayout:
        per_side, count = self.side // self.patch_size, len(frames)
        return VideoLayout(
            (count, 3, self.side, self.side), (count, per_side, per_side), count * per_side**2,
            count * self._vectors_of_frame + 1, tuple(frames), tuple(index / rate for index in frames),
        )  # fmt: skip


def _max_tiles(files: CheckpointFiles) -> int:
    """Of `vision_aspect_ratio`, such as `anyres_max_9`, which the reference reads from two files."""
    found = {str(one["vision_aspect_ratio"]) for one in (files.processor, files.model) if "vision_aspect_ratio" in one}
    name = next(iter(found), f"{_KIND}9")
    number = name.removeprefix(_KIND)
    if len(found) > 1 or not name.startswith(_KIND) or not number.isascii() or not number.isdecimal():
        raise ProcessorConfigError(f"vision_aspect_ratio must be one, such as {_KIND}9")
    return checked_integer("vision_aspect_ratio", int(number[:5]), 1, 256)
