"""Whisper's encoder over log-mel spectrograms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple

import torch

from llmstack_model_runner.encoders.layer import EncoderLayer, LayerSettings
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.patches import PatchEmbedding
from llmstack_model_runner.encoders.sliced_encoder import SlicedEncoder
from llmstack_model_runner.layers import Embedding, LayerNorm
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


class WhisperEncoder(SlicedEncoder):
    """Two convolutions over frames, fixed positions, layers with norms first, and a last norm.

    An item is one window of sound. See `MediaEncoder` for the methods that steps call.

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
        self.size, self.num_states, self._num_bins = layer.size, sizes.num_states, sizes.num_bins
        self._dtype = dtype
        self._activation = linear_activation(layer.activation)
        settings = replace(layer, names=_NAMES, parts_without_bias=(_NAMES[2],))
        self._convolutions = [
            PatchEmbedding(
                f"{_PREFIX}conv{number}", (width, _WIDTH), self.size, has_bias=True, dtype=dtype, device=device
            )
            for number, width in ((1, self._num_bins), (2, self.size))
        ]
        self._positions = Embedding(f"{_PREFIX}embed_positions", self.num_states, self.size, dtype=dtype, device=device)
        self._layers = [
            EncoderLayer(f"{_PREFIX}layers.{number}.", settings, dtype, device) for number in range(sizes.num_layers)
        ]
        self._norm = LayerNorm(f"{_PREFIX}layer_norm", self.size, layer.eps, dtype=dtype, device=device)
        self._parts = [*self._convolutions, self._positions, *self._layers, self._norm]
        self.num_layers: Mapping[MediaKind, int] = {"audio": len(self._layers)}
        self.max_num_tokens: Mapping[MediaKind, int] = {"audio": self.num_states}
        num_frames = STRIDE * self.num_states
        self.work_bytes = dtype.itemsize * (
            num_frames * _WIDTH * (self._num_bins + self.size)
            + self.num_states * (_HIDDEN_COPIES * self.size + layer.inner_size)
        )

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """Frames of a window after both convolutions, with their positions."""
        num_frames = STRIDE * self.num_states
        if len(data) != self._num_bins * num_frames * 4 or item.num_units != self.num_states:
            raise ValueError(f"{len(data)} bytes are not {self._num_bins} mel bins of {num_frames} frames")
        bins = torch.frombuffer(data, dtype=torch.float32).view(self._num_bins, num_frames)
        frames = bins.to(self._device, self._dtype).t()
        first, second = self._convolutions
        hidden = first(_windows(frames, 1), self._activation)
        return (second(_windows(hidden, STRIDE), self._activation, residual=self._positions.weight),)

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        return LayerRun(self._layers[number], (0, self.num_states))

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:  # [num_states, size]
        """The states after the last norm."""
        return self._norm(state[0])


def _windows(frames: torch.Tensor, stride: int) -> torch.Tensor:
    """Windows around every `stride`-th of frames [count, channels], silence at both ends: [.., channels * _WIDTH]."""
    padded = torch.nn.functional.pad(frames, (0, 0, 1, 1))
    return padded.unfold(0, _WIDTH, stride).flatten(1)
