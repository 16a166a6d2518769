"""LLaVA-OneVision: as LLaVA-NeXT, with tiles made smaller where they are many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from llmstack_media.errors import ProcessorConfigError
from llmstack_media.processors.config_values import MAX_SIDE, CheckpointFiles, checked_integer, integer
from llmstack_media.processors.fixed_size import fixed_size
from llmstack_media.processors.layout import ImageLayout
from llmstack_media.processors.llava_next import LlavaNextImageProcessor, grids_of

_KIND = "anyres_max_"
_MAX_TILES_PER_SIDE = 6
_LEAST_RATIO = 1.1
"""Up to here patches are not made fewer."""


@dataclass(frozen=True, kw_only=True)
class LlavaOnevisionImageProcessor(LlavaNextImageProcessor):
    """Of several pictures each is cut into tiles, as the reference does with a flat list of them.

    Attributes:
        max_tiles: As many tiles of patches are kept of a picture beside the whole of it; more are made fewer.
    """

    name: ClassVar[str] = "LlavaOnevisionImageProcessor"
    INERT: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "do_resize": (True,),
        "do_center_crop": (False,),
        "do_pad": (True,),
        "do_convert_rgb": (True,),
    }

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
            image_token=files.token("image_token", "<image>"),
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


def _max_tiles(files: CheckpointFiles) -> int:
    """Of `vision_aspect_ratio`, such as `anyres_max_9`, which the reference reads from two files."""
    found = {str(one["vision_aspect_ratio"]) for one in (files.processor, files.model) if "vision_aspect_ratio" in one}
    name = next(iter(found), f"{_KIND}9")
    number = name.removeprefix(_KIND)
    if len(found) > 1 or not name.startswith(_KIND) or not number.isascii() or not number.isdecimal():
        raise ProcessorConfigError(f"vision_aspect_ratio must be one, such as {_KIND}9")
    return checked_integer("vision_aspect_ratio", int(number[:5]), 1, 256)
