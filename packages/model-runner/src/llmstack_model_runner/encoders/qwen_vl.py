"""The towers of Qwen2-VL and Qwen2.5-VL, the latter with windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from llmstack_kernels.bidirectional_attention import bidirectional_attention
from llmstack_model_runner.encoders.patches import PatchEmbedding
from llmstack_model_runner.encoders.rotation import rotate_heads
from llmstack_model_runner.encoders.vision_config import vision_int
from llmstack_model_runner.layers import LayerNorm, Linear, RMSNorm, WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import gated_activation, linear_activation

_THETA = 10_000.0
_EPS = 1e-6
_SHARED: Mapping[str, Any] = {
    "depth": 32, "num_heads": 16, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_QWEN2: Mapping[str, Any] = {**_SHARED, "embed_dim": 1280, "mlp_ratio": 4}
_QWEN2_5: Mapping[str, Any] = {**_SHARED, "hidden_size": 1280, "intermediate_size": 3420, "window_size": 112}


@dataclass(frozen=True, slots=True)
class _Settings:
    """Sizes of a layer; `is_gated` is Qwen2.5's form, whose norms have no shift."""

    size: int
    inner_size: int
    num_heads: int
    activation: str
    is_gated: bool


class QwenTower:
    """Patches of a picture, those that are merged one after the other, and layers with norms first.

    Attributes:
        size: Width of a hidden state; `inner_size` is that of the feed-forward.
        merge_size: Patches per side that become one vector.
        num_layers: The number of its layers.
    """

    def __init__(
        self, config: Mapping[str, Any], *, has_windows: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`has_windows`: Whether it is that of Qwen2.5-VL."""
        defaults = _QWEN2_5 if has_windows else _QWEN2
        self.size = vision_int(config, "hidden_size" if has_windows else "embed_dim", defaults)
        if has_windows:
            self.inner_size = vision_int(config, "intermediate_size", defaults)
        else:
            self.inner_size = int(self.size * float(config.get("mlp_ratio") or 4))
        activation = str(config.get("hidden_act") or ("silu" if has_windows else "quick_gelu"))
        num_heads = vision_int(config, "num_heads", defaults)
        if self.size % num_heads or self.size // num_heads % 4:
            raise ValueError(f"config.json: vision_config: {num_heads} heads do not divide {self.size} into fours.")
        self._settings = _Settings(self.size, self.inner_size, num_heads, activation, has_windows)
        self.patch_size = vision_int(config, "patch_size", defaults)
        self.merge_size = vision_int(config, "spatial_merge_size", defaults)
        self.num_frames = vision_int(config, "temporal_patch_size", defaults)
        self.num_layers = vision_int(config, "depth", defaults)
        self._window = vision_int(config, "window_size", defaults) if has_windows else 0
        self._window //= self.merge_size * self.patch_size
        whole = config.get("fullatt_block_indexes", (7, 15, 23, 31))
        self._whole_layers = frozenset(whole if has_windows else range(self.num_layers))
        window = (vision_int(config, "in_channels", defaults), self.num_frames, self.patch_size, self.patch_size)
        self._patches = PatchEmbedding(
            "visual.patch_embed.proj", window, self.size, has_bias=False, dtype=dtype, device=device
        )
        self._layers = [
            _Layer(f"visual.blocks.{number}.", self._settings, dtype, device) for number in range(self.num_layers)
        ]

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._patches, *self._layers])

    def enter(self, values: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states before the first layer, and the angles of each: [patches, size], [patches, head_dim / 2].

        `values`: [patches, channels, 1, patch_size, patch_size], of which each frame is the same.
        """
        hidden = self._patches(values.expand(-1, -1, self.num_frames, -1, -1).flatten(1))
        angles = self._angles(rows, columns).to(hidden.device)
        if not self._window:
            return hidden, angles
        order = _windows(rows, columns, self.merge_size, self._window)[0].to(hidden.device)
        return _reorder(hidden, order, self.merge_size), _reorder(angles, order, self.merge_size)

    def run_layer(
        self, number: int, hidden: torch.Tensor, angles: torch.Tensor, rows: int, columns: int
    ) -> torch.Tensor:
        """Hidden states after a layer."""
        starts: Sequence[int] = (0, len(hidden))
        if self._window and number not in self._whole_layers:
            starts = _windows(rows, columns, self.merge_size, self._window)[1]
        return self._layers[number](hidden, angles, starts)

    def in_order(self, vectors: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Merged vectors in the order of the picture."""
        if not self._window:
            return vectors
        order = _windows(rows, columns, self.merge_size, self._window)[0].to(vectors.device)
        return vectors[order.argsort()]

    def _angles(self, rows: int, columns: int) -> torch.Tensor:
        """Row and column of each patch times the frequencies, which each have a half of a head's pairs."""
        half = self.size // self._settings.num_heads // 2
        frequencies = 1.0 / (_THETA ** (torch.arange(0, half, 2, dtype=torch.float) / half))
        merge = self.merge_size
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        blocks = places.view(2, rows // merge, merge, columns // merge, merge).transpose(2, 3).flatten(1)
        return torch.cat([axis[:, None].float() * frequencies for axis in blocks], dim=1)


class _Layer:
    def __init__(self, prefix: str, settings: _Settings, dtype: torch.dtype, device: torch.device) -> None:
        size, inner_size = settings.size, settings.inner_size
        self._num_heads = settings.num_heads
        self._scale = (size // settings.num_heads) ** -0.5

        def linear(in_features: int, parts: Mapping[str, int]) -> Linear:
            named = {prefix + name: out_features for name, out_features in parts.items()}
            return Linear(in_features, named, has_bias=True, dtype=dtype, device=device, keeps_precision=True)

        make_norm = RMSNorm if settings.is_gated else LayerNorm
        self._norms = [make_norm(prefix + name, size, _EPS, dtype=dtype, device=device) for name in ("norm1", "norm2")]
        self._qkv, self._out = linear(size, {"attn.qkv": 3 * size}), linear(size, {"attn.proj": size})
        self._is_quick = settings.activation == "quick_gelu"
        if settings.is_gated:
            self._mlp_in = linear(size, {"mlp.gate_proj": inner_size, "mlp.up_proj": inner_size})
            self._mlp_out = linear(inner_size, {"mlp.down_proj": size})
            self._activation = gated_activation(settings.activation)
        else:
            self._mlp_in = linear(size, {"mlp.fc1": inner_size})
            self._mlp_out = linear(inner_size, {"mlp.fc2": size})
            self._activation = "none" if self._is_quick else linear_activation(settings.activation)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([*self._norms, self._qkv, self._out, self._mlp_in, self._mlp_out])

    def __call__(self, hidden: torch.Tensor, angles: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
        query, key, value = self._qkv(self._norms[0](hidden)).unflatten(-1, (3, self._num_heads, -1)).unbind(1)
        query, key = rotate_heads(query, angles), rotate_heads(key, angles)
        attended = bidirectional_attention(query, key, value, starts, self._scale).flatten(1)
        hidden = self._out(attended, residual=hidden)
        inner = self._mlp_in(self._norms[1](hidden), self._activation)
        if self._is_quick:
            inner = inner * torch.sigmoid(1.702 * inner)
        return self._mlp_out(inner, residual=hidden)


def _reorder(patches: torch.Tensor, order: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Patches in another order of those that are merged."""
    return patches.view(-1, merge_size**2, patches.shape[1])[order].flatten(0, 1)


@lru_cache(maxsize=16)
def _windows(rows: int, columns: int, merge_size: int, window: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Order of the merged patches, window by window, and the starts of windows in patches, with their end."""
    high, wide = rows // merge_size, columns // merge_size
    index = torch.arange(high * wide).view(high, wide)
    parts = [
        index[row : row + window, column : column + window].flatten()
        for row in range(0, high, window)
        for column in range(0, wide, window)
    ]
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part) * merge_size**2)
    return torch.cat(parts), tuple(starts)
