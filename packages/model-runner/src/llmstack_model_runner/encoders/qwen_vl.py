"""The towers of Qwen2-VL, of 2.5 with windows, and of 3 with positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from llmstack_model_runner.encoders.layer import QUICK_GELU
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.patches import PatchEmbedding
from llmstack_model_runner.encoders.square_positions import SquarePositions
from llmstack_model_runner.encoders.vision_config import vision_int
from llmstack_model_runner.layers import LayerNorm, Linear, RMSNorm, WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import gated_activation, linear_activation

_THETA = 10_000.0
NORM_EPS = 1e-6
_SHARED: Mapping[str, Any] = {
    "depth": 32, "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class QwenForm:
    """The differences between the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

    Attributes:
        defaults: Of fields of the `vision_config`.
        size_field: The one with the width of a hidden state.
        activation: Of the feed-forward, if the configuration names none.
        inner_names: The linear layers into the feed-forward; of two the first is the gate, and norms have no shift.
        outer_name: The linear layer out of it.
        merger_names: What makes one vector of a square of patches: its norm, and both linear layers.
        qkv_names: The linear layers that make queries, keys and values.
        has_windows: Whether most layers attend in windows.
        has_positions: Whether patches have a bias and a learned position.
    """

    defaults: Mapping[str, Any]
    size_field: str
    activation: str
    inner_names: tuple[str, ...]
    outer_name: str
    merger_names: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")
    qkv_names: tuple[str, ...] = ("attn.qkv",)
    has_windows: bool = False
    has_positions: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return len(self.inner_names) == 2

    @property
    def make_norm(self) -> type[RMSNorm] | type[LayerNorm]:
        """The class of its norms."""
        return RMSNorm if self.is_gated else LayerNorm


QWEN2 = QwenForm({**_SHARED, "embed_dim": 1280}, "embed_dim", QUICK_GELU, ("mlp.fc1",), "mlp.fc2")
QWEN2_5 = QwenForm(
    {**_SHARED, "hidden_size": 1280, "intermediate_size": 3420, "window_size": 112},
    "hidden_size", "silu", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", has_windows=True,
)  # fmt: skip
OMNI = replace(QWEN2_5, defaults={**QWEN2_5.defaults, "hidden_size": 3584}, qkv_names=("attn.q", "attn.k", "attn.v"))
QWEN3 = QwenForm(
    {**_SHARED, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
     "num_position_embeddings": 2304},
    "hidden_size", "gelu_pytorch_tanh", ("mlp.linear_fc1",), "mlp.linear_fc2",
    ("norm", "linear_fc1", "linear_fc2"), has_positions=True,
)  # fmt: skip


class QwenTower:
    """Patches of a picture or video, those that are merged one after the other, and layers with norms first.

    A layout is (frames, rows, columns) of patches before merging; the patches of a frame attend to each other.

    Attributes:
        size: Width of a hidden state; `inner_size` is that of the feed-forward.
        num_heads: Heads of a layer.
        merge_size: Patches per side that become one vector.
        num_frames: Frames of a video in one patch.
        num_layers: The number of its layers.
    """

    def __init__(self, config: Mapping[str, Any], form: QwenForm, dtype: torch.dtype, device: torch.device) -> None:
        def integer(name: str) -> int:
            return vision_int(config, name, form.defaults)

        self.size = integer(form.size_field)
        if "intermediate_size" in form.defaults:
            self.inner_size = integer("intermediate_size")
        else:
            self.inner_size = int(self.size * float(config.get("mlp_ratio") or 4))
        self.num_heads = integer("num_heads")
        if self.size % self.num_heads or self.size // self.num_heads % 4:
            raise ValueError(
                f"config.json: vision_config: {self.num_heads} heads do not divide {self.size} into fours."
            )
        self.patch_size, self.merge_size = integer("patch_size"), integer("spatial_merge_size")
        self.num_frames, self.num_layers = integer("temporal_patch_size"), integer("depth")
        self._window = integer("window_size") // (self.merge_size * self.patch_size) if form.has_windows else 0
        whole = config.get("fullatt_block_indexes", (7, 15, 23, 31))
        self._whole_layers = frozenset(whole if form.has_windows else range(self.num_layers))
        self._patches = PatchEmbedding(
            "visual.patch_embed.proj",
            (integer("in_channels"), self.num_frames, self.patch_size, self.patch_size),
            self.size,
            has_bias=form.has_positions,
            dtype=dtype,
            device=device,
        )
        self._positions = None
        if form.has_positions:
            number = integer("num_position_embeddings")
            self._positions = SquarePositions("visual.pos_embed", number, self.size, dtype, device)
        activation = str(config.get("hidden_act") or form.activation)
        self._layers = [
            _Layer(f"visual.blocks.{number}.", form, self, activation, dtype, device)
            for number in range(self.num_layers)
        ]

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._patches, self._positions, *self._layers])

    def enter(self, values: torch.Tensor, layout: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the first layer, and the angles of each: [patches, size], [patches, head_dim / 2].

        `values`: [patches, channels, frames, patch_size, patch_size]; one frame stands for all of a patch.
        """
        hidden = self._patches(values.expand(-1, -1, self.num_frames, -1, -1).flatten(1))
        places = self._places(*layout).to(hidden.device)
        if self._positions is not None:
            hidden = hidden + self._positions(places, layout[1:])
        angles = self._angles(places)
        if not self._window:
            return hidden, angles
        order = _windows(layout, self.merge_size, self._window)[0].to(hidden.device)
        return _reorder(hidden, order, self.merge_size), _reorder(angles, order, self.merge_size)

    def layer(self, number: int, angles: torch.Tensor, layout: tuple[int, ...]) -> LayerRun:
        """A layer, in which the patches of one frame or window attend to each other."""
        starts: Sequence[int] = range(0, len(angles) + 1, layout[1] * layout[2])
        if self._window and number not in self._whole_layers:
            starts = _windows(layout, self.merge_size, self._window)[1]
        return LayerRun(self._layers[number], starts, angles)

    def in_order(self, vectors: torch.Tensor, layout: tuple[int, ...]) -> torch.Tensor:
        """Merged vectors in the order of the picture."""
        if not self._window:
            return vectors
        order = _windows(layout, self.merge_size, self._window)[0].to(vectors.device)
        return vectors[order.argsort()]

    def _places(self, frames: int, rows: int, columns: int) -> torch.Tensor:
        """Row and column of each patch within its frame: [2, patches]."""
        merge = self.merge_size
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        blocks = places.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3).flatten(1)
        return blocks.repeat(1, frames)

    def _angles(self, places: torch.Tensor) -> torch.Tensor:
        """Row and column of each patch times the frequencies, which each have a half of a head's pairs."""
        half = self.size // self.num_heads // 2
        frequencies = 1.0 / (_THETA ** (torch.arange(0, half, 2, dtype=torch.float) / half))
        return torch.cat([axis[:, None].float() * frequencies.to(places.device) for axis in places], dim=1)


class _Layer:
    def __init__(
        self, prefix: str, form: QwenForm, tower: QwenTower, activation: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        size, inner_size = tower.size, tower.inner_size
        self._num_heads = tower.num_heads
        self.scale = (size // tower.num_heads) ** -0.5

        def linear(in_features: int, parts: Mapping[str, int]) -> Linear:
            named = {prefix + name: out_features for name, out_features in parts.items()}
            return Linear(in_features, named, has_bias=True, dtype=dtype, device=device, keeps_precision=True)

        self._norms = [
            form.make_norm(prefix + name, size, NORM_EPS, dtype=dtype, device=device) for name in ("norm1", "norm2")
        ]
        self._qkv = linear(size, dict.fromkeys(form.qkv_names, 3 * size // len(form.qkv_names)))
        self._out = linear(size, {"attn.proj": size})
        self._mlp_in = linear(size, dict.fromkeys(form.inner_names, inner_size))
        self._mlp_out = linear(inner_size, {form.outer_name: size})
        self._is_quick = activation == QUICK_GELU
        if form.is_gated:
            self._activation = gated_activation(activation)
        else:
            self._activation = "none" if self._is_quick else linear_activation(activation)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([*self._norms, self._qkv, self._out, self._mlp_in, self._mlp_out])

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values of some rows, as `RowLayer` says."""
        projected: torch.Tensor = self._qkv(self._norms[0](hidden)).unflatten(-1, (3, self._num_heads, -1))
        return projected

    def join(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rows behind the layer, as `RowLayer` says."""
        hidden = self._out(attended, residual=hidden)
        inner = self._mlp_in(self._norms[1](hidden), self._activation)
        if self._is_quick:
            inner = inner * torch.sigmoid(1.702 * inner)
        return self._mlp_out(inner, residual=hidden)


def _reorder(patches: torch.Tensor, order: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Patches in the order in which they are merged."""
    return patches.view(-1, merge_size**2, patches.shape[1])[order].flatten(0, 1)


@lru_cache(maxsize=16)
def _windows(layout: tuple[int, ...], merge_size: int, window: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Order of the merged patches, window by window, and the starts of windows in patches, with their end."""
    frames, high, wide = layout[0], layout[1] // merge_size, layout[2] // merge_size
    index = torch.arange(frames * high * wide).view(frames, high, wide)
    parts = [
        index[frame, row : row + window, column : column + window].flatten()
        for frame in range(frames)
        for row in range(0, high, window)
        for column in range(0, wide, window)
    ]
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part) * merge_size**2)
    return torch.cat(parts), tuple(starts)
