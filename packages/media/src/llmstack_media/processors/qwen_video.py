"""Videos of Qwen2-VL, 2.5 and 3: patches of two frames each."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmstack_media.decode.clips import Clip
from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import ProcessorConfigError, image_too_large, too_many_vectors
from llmstack_media.limits import MAX_VIDEO_FRAMES
from llmstack_media.processors.config_values import (
    MAX_SIDE,
    CheckpointFiles,
    boolean,
    checked_integer,
    integer,
    number,
    size_of,
)
from llmstack_media.processors.layout import Piece, VideoLayout
from llmstack_media.processors.processor import BICUBIC, CLIP_MEAN, CLIP_STD, HALF
from llmstack_media.processors.qwen2_vl import BEGIN, END, cut_patches, fit_sides
from llmstack_media.processors.video import DEFAULT_FRAMES, VideoProcessor

_MAX_SECONDS = 99_999
"""More than a day. It bounds the length of the times that stand in a prompt."""
_TOKENS_PER_SECOND = 4
"""Of Qwen2.5-VL, where the configuration does not say it."""


@dataclass(frozen=True, kw_only=True)
class QwenVideoProcessor(VideoProcessor):
    """The grid of a layout begins with times, rows and columns of patches before merging.

    An array has the shape [patches, 3, temporal_patch_size, patch_size, patch_size]. The last frame is repeated until
    the frames fill their patches.

    Attributes:
        min_pixels: Of a resized frame, or of all together.
        max_pixels: Of the same.
        has_cap: Whether the pixels of a frame are limited further, by `max_video_tokens`.
    """

    SIZE: ClassVar[Mapping[str, int]]
    """Bounds of pixels, where the checkpoint has none."""
    SIDE: ClassVar[int]
    """Of a patch, where the checkpoint does not say it."""
    MAX_TOKENS: ClassVar[int]
    FPS: ClassVar[float]
    """Frames that are taken of a second, if frames are chosen; 0 for all."""
    CHOOSES: ClassVar[bool]
    """Whether they are chosen, where the checkpoint does not say it."""

    min_pixels: int
    max_pixels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_frames: int
    max_frames: int
    has_cap: bool
    max_video_tokens: int

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise ProcessorConfigError(f"max_pixels must be at least min_pixels ({self.min_pixels})")

    @classmethod
    def of_checkpoint(cls, files: CheckpointFiles, max_vectors: int) -> Self:
        values = files.video
        size = size_of(values.get("size"), "size", cls.SIZE, is_square=False)
        size |= {edge: values[name] for name, edge in cls._other_names() if values.get(name) is not None}
        low, high = (checked_integer(f"size.{edge}", size.get(edge), 1, MAX_SIDE**2) for edge in cls.SIZE)
        is_chosen = boolean(values, "do_sample_frames", cls.CHOOSES)
        num_frames = integer(values, "num_frames", 0, 0, MAX_VIDEO_FRAMES) if is_chosen else 0
        return cls(
            **cls._common(values),
            **cls._of_family(files),
            num_frames=num_frames,
            fps=float(number(values, "fps", cls.FPS)) if is_chosen and not num_frames else 0.0,
            max_vectors=max_vectors,
            min_pixels=low,
            max_pixels=high,
            patch_size=integer(values, "patch_size", cls.SIDE, 1, MAX_SIDE),
            temporal_patch_size=integer(values, "temporal_patch_size", 2, 1, 64),
            merge_size=integer(values, "merge_size", 2, 1, 64),
            min_frames=integer(values, "min_frames", 4, 1, MAX_VIDEO_FRAMES),
            max_frames=integer(values, "max_frames", MAX_VIDEO_FRAMES, 1, MAX_VIDEO_FRAMES),
            has_cap=boolean(values, "cap_pixels_per_frame", False),
            max_video_tokens=integer(values, "max_video_tokens", cls.MAX_TOKENS),
            token=files.token("video_token", "<|video_pad|>"),
            around=(BEGIN, END),
        )

    @classmethod
    def _other_names(cls) -> Sequence[tuple[str, str]]:
        """Names of older files for the bounds of pixels."""
        return ()

    @classmethod
    def _of_family(cls, files: CheckpointFiles) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _sides(self, num_frames: int, sides: tuple[int, int]) -> tuple[int, int]:
        """Height and width of a resized frame."""

    @abstractmethod
    def _choose(self, clip: Clip) -> Sequence[int]:
        """Numbers of the frames to take of more than are wanted, by transformers' arithmetic."""

    def _grid(self, layout_grid: tuple[int, int, int], fps: float) -> tuple[int, ...]:
        """The grid, with what positions need besides. `fps`: Frames per second of those that are taken."""
        return layout_grid

    @property
    def factor(self) -> int:
        """Pixels per side of what becomes one vector."""
        return self.patch_size * self.merge_size

    def layout(self, clip: Clip) -> VideoLayout:
        frames, rate = self._frames(clip), self.rate(clip)
        sides = self._sides(len(frames), (clip.height, clip.width))
        rows, columns = (side // self.patch_size for side in sides)
        found = self._layout(frames, (rows, columns), rate, len(frames) / clip.num_frames * rate)
        if found.seconds[-1] > _MAX_SECONDS:
            raise image_too_large(f"lasts longer than {_MAX_SECONDS} seconds")
        if found.num_vectors > self.max_vectors:
            raise too_many_vectors(found.num_vectors, self.max_vectors, " or smaller ones (max_pixels)")
        return found

    def largest(self) -> VideoLayout:
        num_patches = min(math.ceil(self.max_frames / self.temporal_patch_size), self.max_vectors)
        frames = range(num_patches * self.temporal_patch_size)
        sides = (self.merge_size, self.merge_size * math.ceil(self.max_vectors / num_patches))
        return self._layout(frames, sides, len(frames) / _MAX_SECONDS, math.inf)

    def prepare(self, frames: Iterable[Pixels], layout: VideoLayout) -> NDArray[np.uint8]:
        _, rows, columns = layout.grid[:3]
        height, width = rows * self.patch_size, columns * self.patch_size
        count = layout.grid[0] * self.temporal_patch_size
        resized = np.empty((count, height, width, 3), dtype=np.uint8)
        for index, frame in enumerate(frames):
            resized[index] = self._resized(frame, height, width)
        resized[len(layout.frames) :] = resized[len(layout.frames) - 1]
        return cut_patches(resized, self.temporal_patch_size, self.patch_size, self.merge_size)

    def _frames(self, clip: Clip) -> Sequence[int]:
        """Numbers of the frames to take: of a list all, unless their number is limited."""
        if clip.is_list and not self.num_frames:
            return range(clip.num_frames)
        return self._choose(clip)

    def _layout(self, frames: Sequence[int], sides: tuple[int, int], rate: float, taken: float) -> VideoLayout:
        """`sides`: Patches of a frame. `rate`: Frames per second; `taken` of those that are taken."""
        length = self.temporal_patch_size
        num_times = math.ceil(len(frames) / length)
        num_patches = num_times * sides[0] * sides[1]
        shape = (num_patches, 3, length, self.patch_size, self.patch_size)
        filled = [*frames, *[frames[-1]] * (num_times * length - len(frames))]
        seconds = [index / rate for index in filled]
        shown = tuple((seconds[at] + seconds[at + length - 1]) / 2 for at in range(0, len(filled), length))
        grid = self._grid((num_times, *sides), taken)
        return VideoLayout(shape, grid, num_patches, num_patches // self.merge_size**2, tuple(frames), shown)


@dataclass(frozen=True, kw_only=True)
class Qwen2VLVideoProcessor(QwenVideoProcessor):
    """Bounds of pixels are those of a frame. Qwen2.5-VL's grid ends with the bits of a float32: positions per time.

    Attributes:
        tokens_per_second: Positions that pass in a second; 0 for Qwen2-VL, whose times are one position each.
    """

    name: ClassVar[str] = "Qwen2VLVideoProcessor"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    SIZE: ClassVar[Mapping[str, int]] = {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}
    SIDE: ClassVar[int] = 14
    MAX_TOKENS: ClassVar[int] = 128_000
    FPS: ClassVar[float] = 0.0
    CHOOSES: ClassVar[bool] = False

    tokens_per_second: float

    @classmethod
    def _other_names(cls) -> Sequence[tuple[str, str]]:
        return (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))

    @classmethod
    def _of_family(cls, files: CheckpointFiles) -> dict[str, Any]:
        has_times = files.model.get("model_type") == "qwen2_5_vl"
        return {"tokens_per_second": number(files.vision, "tokens_per_second", _TOKENS_PER_SECOND) * has_times}

    def _sides(self, num_frames: int, sides: tuple[int, int]) -> tuple[int, int]:
        most = self.max_pixels
        if self.has_cap:
            total = int(self.max_video_tokens * self.factor**2 * 0.9)
            most = max(min(most, total * self.temporal_patch_size // num_frames), int(self.min_pixels * 1.05))
        return fit_sides(sides, self.factor, self.min_pixels, most)

    def _choose(self, clip: Clip) -> Sequence[int]:
        total, length = clip.num_frames, self.temporal_patch_size
        count = float(total)
        if self.fps and not clip.is_list:
            most = math.floor(min(self.max_frames, total) / length) * length
            wanted = min(max(total / self.rate(clip) * self.fps, self.min_frames), most, total)
            count = math.floor(wanted / length) * length
        limit = self.num_frames or (MAX_VIDEO_FRAMES if self.fps else DEFAULT_FRAMES)
        count = max(min(count, max(round(limit / length), 1) * length), 1)
        # float32, as in torch, decides on which side of an integer a number lies.
        return [int(index) for index in np.arange(0, total, total / count).astype(np.float32)]

    def _grid(self, layout_grid: tuple[int, int, int], fps: float) -> tuple[int, ...]:
        if not self.tokens_per_second:
            return layout_grid
        step = np.float32(self.tokens_per_second) * np.float32(self.temporal_patch_size / fps)
        if (layout_grid[0] - 1) * float(step) >= math.prod(layout_grid) // self.merge_size**2:
            raise image_too_large("shows its frames too slowly for this model: it has more positions than tokens")
        return (*layout_grid, int(step.view(np.uint32)))


@dataclass(frozen=True, kw_only=True)
class Qwen3VLVideoProcessor(QwenVideoProcessor):
    """Bounds of pixels are those of all frames. Before each patch of frames stands when it is shown."""

    name: ClassVar[str] = "Qwen3VLVideoProcessor"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {"resample": BICUBIC, "image_mean": HALF, "image_std": HALF}
    SIZE: ClassVar[Mapping[str, int]] = {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}
    SIDE: ClassVar[int] = 16
    MAX_TOKENS: ClassVar[int] = 768
    FPS: ClassVar[float] = 2.0
    CHOOSES: ClassVar[bool] = True

    def _sides(self, num_frames: int, sides: tuple[int, int]) -> tuple[int, int]:
        factor, most = self.factor, self.max_pixels
        if self.has_cap:
            share = min(self.max_video_tokens * factor**2, most // num_frames)
            most = max(share, int(self.min_pixels * 1.05)) * num_frames
        if min(sides) < factor:
            scale = max(factor / side for side in sides)
            sides = (int(sides[0] * scale), int(sides[1] * scale))
        length = self.temporal_patch_size
        counted = round(num_frames / length) * length
        return fit_sides(sides, factor, self.min_pixels, most, (num_frames, counted))

    def _choose(self, clip: Clip) -> Sequence[int]:
        total = count = clip.num_frames
        if self.fps and not clip.is_list:
            count = min(max(int(total / self.rate(clip) * self.fps), self.min_frames), self.max_frames, total)
        count = min(count, self.num_frames or (MAX_VIDEO_FRAMES if self.fps else DEFAULT_FRAMES))
        return [int(index) for index in np.linspace(0, total - 1, count).round()]

    def placeholders(self, layout: VideoLayout) -> tuple[Piece, ...]:
        num_vectors = layout.num_vectors // len(layout.seconds)
        pieces, text = [], ""
        for second in layout.seconds:
            pieces += [Piece(f"{text}<{second:.1f} seconds>{BEGIN}"), Piece(self.token, num_vectors)]
            text = END
        return (*pieces, Piece(END))
