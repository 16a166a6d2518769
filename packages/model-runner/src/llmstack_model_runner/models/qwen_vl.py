"""Pictures and videos of Qwen-VL, and positions on three axes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageLayout, ImageProcessor, PixelProcessor, VideoProcessor
from llmstack_model_runner.encoders.image_encoder import ImageEncoder
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.qwen_vl import NORM_EPS, QWEN2, QWEN2_5, QWEN3, QwenForm, QwenTower
from llmstack_model_runner.encoders.vision_config import vision_fields
from llmstack_model_runner.layers import Linear, WeightSlot, collect_slots
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.models.llama import Llama
from llmstack_types import MediaItem

_MAX_STEP = 1 << 16


class ThreeAxes(Llama):
    """A text model whose pairs of dimensions rotate by frame, row or column of a picture's token.

    All three are equal for text. So the table of the rotary embedding is that of one axis, from which a step with
    tokens of pictures takes a row of its own for each of its tokens.
    """

    moves_positions: ClassVar[bool] = True
    sections: ClassVar[tuple[int, ...]] = (16, 24, 24)
    """Pairs of each axis, if the configuration does not say it."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        sections: Any = found.get("mrope_section") or self.sections
        (self._rotary,) = self._rotaries
        num_pairs = self._rotary.rotary_dim // 2
        is_list = isinstance(sections, (list, tuple)) and all(type(size) is int and size > 0 for size in sections)
        if not is_list or len(sections) != 3 or sum(sections) != num_pairs:
            raise ValueError(f"config.json: mrope_section must be three sizes with the sum {num_pairs}.")
        axes = self._axes_of_pairs(sections, is_interleaved=bool(found.get("mrope_interleaved")))
        self._axes = torch.cat((axes, axes)).to(device)  # of each column of the table: cosines, then sines

    def _axes_of_pairs(self, sections: list[int], *, is_interleaved: bool) -> torch.Tensor:
        """The axis of each pair of dimensions, 0 to 2; `is_interleaved` is what the configuration says."""
        if is_interleaved:
            raise ValueError("config.json: mrope_interleaved is not this architecture's order of sections.")
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata, kv_caches: KVCaches
    ) -> torch.Tensor:
        given = metadata.vectors
        if given is None or given.axes is None:
            return super().forward(token_ids, positions, metadata, kv_caches)
        on_axes = positions.expand(3, -1).index_copy(1, given.places, given.axes)
        rows = self._rotary.table[on_axes]  # [3, num_tokens, rotary_dim]
        chosen = rows.gather(0, self._axes.expand(1, rows.shape[1], -1))[0]
        with self._rotary.table_of_step(chosen):
            return super().forward(
                token_ids, torch.arange(len(positions), device=positions.device), metadata, kv_caches
            )


class InterleavedAxes(ThreeAxes):
    """Qwen3-VL's order: frame, row, column, frame, row, column, and frames alone at the end."""

    sections: ClassVar[tuple[int, ...]] = (24, 20, 20)

    def _axes_of_pairs(self, sections: list[int], *, is_interleaved: bool) -> torch.Tensor:
        """The order is the class's, whatever the configuration says, as in transformers."""
        pairs = torch.arange(sum(sections))
        axes = pairs % 3
        return torch.where(pairs < 3 * torch.tensor(sections)[axes], axes, 0)


class InterleavedAxesOfQwen3_5(InterleavedAxes):
    """Interleaved axes for the rotated part of Qwen 3.5's heads."""

    sections: ClassVar[tuple[int, ...]] = (11, 11, 10)


class _Merger:
    """Squares of patches to one vector each."""

    def __init__(
        self, prefix: str, tower: QwenTower, form: QwenForm, text_size: int, dtype: torch.dtype,
        device: torch.device, *, is_merged_before: bool = False,
    ) -> None:  # fmt: skip
        """`is_merged_before`: The norm is that of a square."""
        norm, first, second = (prefix + name for name in form.merger_names)
        self._size = tower.size * tower.merge_size**2
        self._norm_size = self._size if is_merged_before else tower.size
        self._norm = form.make_norm(norm, self._norm_size, NORM_EPS, dtype=dtype, device=device)
        self._first, self._second = (
            Linear(self._size, {name: out_features}, has_bias=True, dtype=dtype, device=device, keeps_precision=True)
            for name, out_features in ((first, self._size), (second, text_size))
        )

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._norm, self._first, self._second])

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[patches, size] to [vectors, text_size]."""
        normed = self._norm(hidden.reshape(-1, self._norm_size)).view(-1, self._size)
        return self._second(self._first(normed, "gelu"))


def _grid_positions(sides: tuple[int, ...], step: float) -> torch.Tensor:
    """Positions [3, vectors] of times, each `step` behind the one before, of rows and of columns."""
    times = (torch.arange(sides[0]) * step).long()
    return torch.stack(torch.meshgrid(times, *map(torch.arange, sides[1:]), indexing="ij")).flatten(1)


def _step_of(item: MediaItem) -> float:
    """Positions from one time to the next."""
    if len(item.layout) < 4:
        return 1.0
    (step,) = struct.unpack("<f", struct.pack("<I", item.layout[3] & 0xFFFFFFFF))
    return float(step) if 0 <= step < _MAX_STEP else 0.0


class QwenVLEncoder(ImageEncoder):
    """The layout of an item is (times, rows, columns) of patches before merging; a picture has one time.

    That of a video of Qwen2.5-VL goes on with the bits of a float32: positions from one time to the next.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("visual.",)
    text_class: ClassVar[type[Llama]] = ThreeAxes
    form: ClassVar[QwenForm] = QWEN2
    has_text_between: ClassVar[bool] = False
    """Whether text stands between the times of a video, so that each begins at a position of its own."""

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        tower = QwenTower(vision_fields(whole), self.form, dtype, device)
        super().__init__(processor, tower.num_layers, (tower.size, tower.inner_size), dtype, device)
        self._tower = tower
        self._check_patches(processor, 1)
        self._merger = _Merger("visual.merger.", tower, self.form, text_size, dtype, device)
        self._parts = (tower, self._merger)

    def take_videos(self, processor: VideoProcessor) -> None:
        """Lets items be videos; see `ImageEncoder`."""
        self._check_patches(processor, self._tower.num_frames)
        self._take("video", processor)

    def _check_patches(self, processor: PixelProcessor[Any], num_frames: int) -> None:
        shape, tower = processor.largest().shape[1:], self._tower
        if shape != (3, num_frames, tower.patch_size, tower.patch_size):
            raise ValueError(f"Patches of shape {list(shape)} do not fit the encoder of this model.")

    def positions(self, item: MediaItem) -> torch.Tensor | None:
        """Frame, row and column of each token; None where the layout is not the item's, which `begin` refuses.

        What follows a video goes on behind the largest of its positions, as in the models' first code. In transformers
        5 the text of a prompt goes on behind its rows and columns, and what is generated then behind all of them.
        """
        grid = self._grid(item)
        runs = item.embed_runs or ((0, item.num_tokens),)
        num_runs = grid[0] if self.has_text_between else 1
        sides = (grid[0] // max(num_runs, 1), *(side // self._tower.merge_size for side in grid[1:]))
        frames = _grid_positions(sides, _step_of(item))
        if any(length != frames.shape[1] for _, length in runs) or len(runs) != num_runs or not num_runs:
            return None
        columns, behind, end = [], 0, 0
        for start, length in runs:
            columns += [torch.arange(behind, behind + start - end).expand(3, -1), frames + behind + start - end]
            behind += start - end + 1 + int(frames.max())
            end = start + length
        found = torch.cat(columns, dim=1)
        # No position is beyond what places can be: tables end there.
        return found if end == item.num_tokens and int(found.max()) < end else None

    def _grid(self, item: MediaItem) -> tuple[int, ...]:
        """Times, rows and columns of patches; zeros if the layout is none."""
        grid, merge = item.layout[:3], self._tower.merge_size
        is_video = item.kind == "video"
        has_length = len(item.layout) in ((3, 4) if is_video else (3,))
        if not has_length or grid[0] < 1 or (grid[0] > 1 and not is_video) or any(side % merge for side in grid[1:]):
            return (0, 0, 0)
        return grid

    def _shape(self, item: MediaItem) -> tuple[int, ...]:
        tower = self._tower
        num_frames = tower.num_frames if item.kind == "video" else 1
        return (math.prod(self._grid(item)), 3, num_frames, tower.patch_size, tower.patch_size)

    def _enter(self, item: MediaItem, values: torch.Tensor) -> EncoderState:
        return self._tower.enter(values, item.layout[:3])

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        return self._tower.layer(number, state[1], item.layout[:3])

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for each square of patches."""
        return self._tower.in_order(self._merger(state[0]), item.layout[:3])


class Qwen2_5VLEncoder(QwenVLEncoder):
    """Most layers attend in windows."""

    form: ClassVar[QwenForm] = QWEN2_5


class Qwen3_5Encoder(QwenVLEncoder):
    """Patches have learned positions."""

    text_class: ClassVar[type[Llama]] = InterleavedAxesOfQwen3_5
    form: ClassVar[QwenForm] = QWEN3
    has_text_between: ClassVar[bool] = True


class Qwen3VLEncoder(Qwen3_5Encoder):
    """Some layers make a further vector of each square, for the hidden states of the first decoder layers."""

    text_class: ClassVar[type[Llama]] = InterleavedAxes

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(whole, text_size, processor, dtype, device)
        tower = self._tower
        numbers = vision_fields(whole).get("deepstack_visual_indexes", (8, 16, 24))
        known = range(tower.num_layers)
        if not isinstance(numbers, (list, tuple)) or any(number not in known for number in numbers):
            raise ValueError("config.json: vision_config.deepstack_visual_indexes must be numbers of its layers.")
        if list(numbers) != sorted(set(numbers)):
            raise ValueError("config.json: vision_config.deepstack_visual_indexes must ascend.")
        self._deep_mergers = {
            number: _Merger(
                f"visual.deepstack_merger_list.{index}.", tower, self.form, text_size, dtype, device,
                is_merged_before=True,
            )
            for index, number in enumerate(numbers)
        }  # fmt: skip
        self.num_deep = len(numbers)
        self._parts = (*self._parts, *self._deep_mergers.values())
        self._text_size = text_size

    def _work_bytes_of(self, layout: ImageLayout) -> int:
        deep_bytes = self.num_deep * layout.num_vectors * self._text_size * self._dtype.itemsize
        return super()._work_bytes_of(layout) + 2 * deep_bytes  # of the state, and joined

    def _behind_layer(self, state: EncoderState, number: int) -> EncoderState:
        merger = self._deep_mergers.get(number)
        return state if merger is None else (*state, merger(state[0]))

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """The vectors, and behind each what is added to its hidden state after the first layers."""
        return torch.cat((super().finish(item, state), *state[2:]), dim=1)
