"""Pictures of Qwen2-VL and Qwen2.5-VL, and positions on three axes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageProcessor
from llmstack_model_runner.encoders.image_encoder import ImageEncoder
from llmstack_model_runner.encoders.qwen_vl import QwenTower
from llmstack_model_runner.encoders.vision_config import vision_fields
from llmstack_model_runner.layers import LayerNorm, Linear, RMSNorm
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.models.llama import Llama
from llmstack_types import MediaItem

_SECTIONS = (16, 24, 24)


class ThreeAxes(Llama):
    """A text model whose pairs of dimensions rotate by frame, row or column of a picture's token.

    All three are equal for text. So the table of the rotary embedding is that of one axis, from which a step with
    tokens of pictures takes a row of its own for each of its tokens.
    """

    moves_positions: ClassVar[bool] = True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        sections = found.get("mrope_section") or _SECTIONS
        (self._rotary,) = self._rotaries
        num_pairs = self._rotary.rotary_dim // 2
        is_list = isinstance(sections, (list, tuple)) and all(type(size) is int and size > 0 for size in sections)
        if not is_list or len(sections) != 3 or sum(sections) != num_pairs or found.get("mrope_interleaved"):
            raise ValueError(
                f"config.json: mrope_section must be three sizes with the sum {num_pairs}, one section after the other."
            )
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        self._axes = torch.cat((axes, axes)).to(device)  # of each column of the table: cosines, then sines

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


class QwenVLEncoder(ImageEncoder):
    """The layout of an item is (1, rows, columns) of patches before merging."""

    prefixes: ClassVar[tuple[str, ...]] = ("visual.",)
    text_class: ClassVar[type[Llama] | None] = ThreeAxes
    has_windows: ClassVar[bool] = False

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        tower = QwenTower(vision_fields(whole), has_windows=self.has_windows, dtype=dtype, device=device)
        super().__init__(processor, tower.num_layers, (tower.size, tower.inner_size), dtype, device)
        self._tower = tower
        self._patch_shape = processor.largest().shape[1:]
        if self._patch_shape != (3, 1, tower.patch_size, tower.patch_size):
            raise ValueError(f"Patches of shape {list(self._patch_shape)} do not fit the encoder of this model.")
        make_norm = RMSNorm if self.has_windows else LayerNorm
        self._norm = make_norm("visual.merger.ln_q", tower.size, 1e-6, dtype=dtype, device=device)
        size = tower.size * tower.merge_size**2
        self._first, self._second = (
            Linear(
                size, {f"visual.merger.mlp.{name}": out_features}, has_bias=True, dtype=dtype, device=device,
                keeps_precision=True,
            )
            for name, out_features in ((0, size), (2, text_size))
        )  # fmt: skip
        self._parts = (tower, self._norm, self._first, self._second)

    def positions(self, item: MediaItem) -> torch.Tensor | None:
        """Frame, row and column of each vector; None where the layout is not the item's, which `begin` refuses."""
        merge = self._tower.merge_size
        sides = [side // merge for side in item.layout[1:]] if self._is_grid(item) else [0]
        if math.prod(sides) != item.num_tokens:
            return None
        return torch.stack(torch.meshgrid(*map(torch.arange, (1, *sides)), indexing="ij")).flatten(1)

    def _is_grid(self, item: MediaItem) -> bool:
        layout, merge = item.layout, self._tower.merge_size
        return len(layout) == 3 and layout[0] == 1 and not any(side % merge for side in layout[1:])

    def _shape(self, item: MediaItem) -> tuple[int, ...]:
        num_patches = math.prod(item.layout) if self._is_grid(item) else 0
        return (num_patches, *self._patch_shape)

    def _enter(self, item: MediaItem, values: torch.Tensor) -> EncoderState:
        return self._tower.enter(values, *item.layout[1:])

    def _run_layer(self, item: MediaItem, state: EncoderState, number: int) -> EncoderState:
        hidden, angles = state
        return (self._tower.run_layer(number, hidden, angles, *item.layout[1:]), angles)

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for each square of patches."""
        merged = self._norm(state[0]).view(-1, self._tower.size * self._tower.merge_size**2)
        return self._tower.in_order(self._second(self._first(merged, "gelu")), *item.layout[1:])


class Qwen2_5VLEncoder(QwenVLEncoder):
    """Most layers attend in windows."""

    has_windows: ClassVar[bool] = True
