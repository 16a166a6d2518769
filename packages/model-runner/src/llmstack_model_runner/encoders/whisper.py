"""Whisper's encoder over log-mel spectrograms, and parts of other sound encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar, Final, NamedTuple, cast

import torch

from llmstack_model_runner.encoders.layer import EncoderLayer, LayerSettings
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.patches import PatchEmbedding
from llmstack_model_runner.encoders.sliced_encoder import SlicedEncoder
from llmstack_model_runner.layers import Embedding, LayerNorm, WeightSlot, collect_slots
from llmstack_model_runner.layers.linear import linear_activation
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind

_PREFIX: Final = "model.encoder."
_WIDTH = 3
"""Frames of a window of either convolution."""
STRIDE: Final = 2
"""Frames of a spectrogram for each state of the encoder: the step of its second convolution."""
_NAMES = (
    "self_attn_layer_norm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj",
    "final_layer_norm", "fc1", "fc2",
)  # fmt: skip
_HIDDEN_COPIES = 6
"""Tensors of the width of a hidden state that a layer holds at once."""


class SpeechSizes(NamedTuple):
    """Sizes of an encoder of speech.

    Attributes:
        num_bins: Mel bins of a frame.
        num_states: States of a window.
    """

    num_bins: int
    num_states: int
    num_layers: int


class FrameTower:
    """Two convolutions over the frames of each window, fixed positions, layers with norms first, and a last norm."""

    def __init__(
        self, prefix: str, sizes: SpeechSizes, layer: LayerSettings, dtype: torch.dtype, device: torch.device,
        *, norm: str = "layer_norm", positions: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """The parts by their names in a checkpoint.

        Args:
            prefix: Of all names.
            sizes: Of the tower.
            layer: Without names, which are Whisper's own.
            dtype: In which it computes.
            device: Where it computes.
            norm: Name of the last norm.
            positions: Where they are no weights, [num_states, size].
        """
        self.size, self.num_states, self.num_bins = layer.size, sizes.num_states, sizes.num_bins
        self.dtype, self.device, self.inner_size = dtype, device, layer.inner_size
        self._activation = linear_activation(layer.activation)
        settings = replace(layer, names=_NAMES, parts_without_bias=(_NAMES[2],))
        self._convolutions = [
            PatchEmbedding(
                f"{prefix}conv{number}",
                (width, _WIDTH),
                self.size,
                has_bias=True,
                dtype=dtype,
                device=device,
                has_channels_last=True,
            )
            for number, width in ((1, self.num_bins), (2, self.size))
        ]
        self._given = None if positions is None else positions.to(device, dtype)
        self._table = (
            Embedding(f"{prefix}embed_positions", self.num_states, self.size, dtype=dtype, device=device)
            if positions is None
            else None
        )
        self.layers = [
            EncoderLayer(f"{prefix}layers.{number}.", settings, dtype, device) for number in range(sizes.num_layers)
        ]
        self.norm = LayerNorm(f"{prefix}{norm}", self.size, layer.eps, dtype=dtype, device=device)

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([*self._convolutions, self._table, *self.layers, self.norm])

    def work_bytes(self, num_states: int) -> int:
        """Upper estimate of what so many states need while they are encoded; windows are convolved one by one."""
        return self.dtype.itemsize * (
            STRIDE * min(num_states, self.num_states) * _WIDTH * (self.num_bins + self.size)
            + num_states * (_HIDDEN_COPIES * self.size + self.inner_size)
        )

    def enter(self, frames: torch.Tensor, num_states: int) -> torch.Tensor:  # [num_states, size]
        """States of one window before the first layer, from its frames [num_frames, num_bins].

        A frame behind those of the states is seen by the first convolution alone. Around all of them is silence.
        """
        first, second = self._convolutions
        positions = self._given if self._table is None else self._table.weight
        hidden = first(_windows(frames, 1), self._activation)[: STRIDE * num_states]
        return second(_windows(hidden, STRIDE), self._activation, residual=cast("torch.Tensor", positions)[:num_states])


class FrameEncoder(SlicedEncoder):
    """Sound by windows of frames: a mixin of encoders with a tower. Subclasses set `_tower`.

    The layout of an item is (frames). States attend to those of their own window.

    Attributes:
        num_layers: See `MediaEncoder`, also for the others.
    """

    _tower: FrameTower
    num_layers: Mapping[MediaKind, int]
    max_num_tokens: Mapping[MediaKind, int]
    _max_num_states: int

    def _set_sizes(self, max_num_states: int, max_num_vectors: int) -> None:
        """Sets the sizes that follow from the longest sound."""
        self.num_layers = {"audio": len(self._tower.layers)}
        self.max_num_tokens = {"audio": max_num_vectors}
        self._max_num_states = max_num_states

    @property
    def work_bytes(self) -> int:
        """The memory for the longest sound, as `MediaEncoder` says it."""
        return self._tower.work_bytes(self._max_num_states)

    def _states_of(self, num_frames: int) -> int:
        """States of a window with so many frames."""
        return -(-num_frames // STRIDE)

    def _window_sizes(self, item: MediaItem) -> list[tuple[int, int]]:
        """Frames and states of each window; none where the layout is not of sound."""
        if len(item.layout) != 1 or not 0 < item.layout[0] <= STRIDE * (item.num_units + 1):
            return []
        most, num_frames = STRIDE * self._tower.num_states, item.layout[0]
        sizes = [min(most, num_frames - start) for start in range(0, num_frames, most)]
        return [(size, self._states_of(size)) for size in sizes]

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """Frames of each window after both convolutions, with their positions."""
        tower, sizes = self._tower, self._window_sizes(item)
        num_frames = sum(size for size, _ in sizes)
        is_whole = len(data) == tower.num_bins * num_frames * 4 and sum(count for _, count in sizes) == item.num_units
        if not data or not is_whole:
            raise ValueError(f"{len(data)} bytes are not {tower.num_bins} mel bins of {num_frames} frames")
        bins = torch.frombuffer(data, dtype=torch.float32).view(tower.num_bins, num_frames)
        parts = bins.to(tower.device, tower.dtype).t().split([size for size, _ in sizes])
        states = [tower.enter(part, count) for part, (_, count) in zip(parts, sizes, strict=True)]
        return (torch.cat(states),)

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        counts = (count for _, count in self._window_sizes(item))
        return LayerRun(self._tower.layers[number], tuple(accumulate(counts, initial=0)))


class WhisperEncoder(FrameEncoder):
    """An item is one window of sound, or the beginning of one, which costs less.

    See `MediaEncoder` for the methods that steps call.

    Attributes:
        num_states: States of a window, to which a decoder attends.
        size: Width of a state.
        is_atomic: See `MediaEncoder`, also for `num_deep`.
    """

    is_atomic: ClassVar[bool] = False
    num_deep: ClassVar[int] = 0

    def __init__(self, sizes: SpeechSizes, layer: LayerSettings, dtype: torch.dtype, device: torch.device) -> None:
        """`layer`: Without names, which are Whisper's own."""
        super().__init__(device)
        self._tower = FrameTower(_PREFIX, sizes, layer, dtype, device)
        self.size, self.num_states = layer.size, sizes.num_states
        self._parts = [self._tower]
        self._set_sizes(self.num_states, self.num_states)

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        if not 0 < item.num_units <= self.num_states:
            raise ValueError(f"{item.num_units} states are no window of at most {self.num_states}")
        return super().begin(item, data)

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:  # [num_units, size]
        """The states after the last norm."""
        return self._tower.norm(state[0])


def _windows(frames: torch.Tensor, stride: int) -> torch.Tensor:
    """Windows around every `stride`-th of frames [count, channels], silence at both ends: [.., _WIDTH * channels].

    They are rows that overlap in one memory: nothing is copied for each.
    """
    count, channels = frames.shape
    padded = frames.new_zeros(count + 2, channels)
    padded[1:-1] = frames
    return padded.as_strided(((count - 1) // stride + 1, _WIDTH * channels), (stride * channels, 1))
