"""Encoders of sound of transformers, alone or beside those of pictures.

`get_audio_features` is called, of the class without its text model and without the tower of pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from llmstack_media import Processors, SoundProcessor
from llmstack_model_runner.encoders.image_encoder import num_places
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.transformers_backend.encoder_part import EncoderPart, PartEncoder
from llmstack_model_runner.models.transformers_backend.resolve import resolve_whole
from llmstack_types import MediaItem

_COPIES = 16
"""Tensors of the width of a state that a layer holds at once: it widens inside, and attends in windows."""


class TransformersSounds(PartEncoder):
    """The encoder of sound of a class of transformers, run some layers at a time where it allows that."""

    prefixes: ClassVar[tuple[str, ...]] = ()
    _noun = "a sound"

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: SoundProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        config, model_class = resolve_whole(whole)
        if hasattr(config, "vision_config"):
            config.vision_config = None
        super().__init__(device)
        self.slice_units = 0  # layers are computed whole
        self._part = EncoderPart(config, model_class, dtype)
        self.ignored = self._part.counters
        self._processor, self._text_size, self._dtype, self._device = processor, text_size, dtype, device
        largest = processor.largest()
        self._num_bins, self._largest = largest.shape[0], largest
        self.num_layers = {"audio": self._part.depth}
        self.max_num_tokens = {"audio": num_places(processor.placeholders(largest))}

    @classmethod
    def of(
        cls, whole: Mapping[str, Any], text_size: int, found: Processors, dtype: torch.dtype, device: torch.device
    ) -> Self:
        if found.audio is None:
            raise ValueError("How sound is prepared is not known.")
        return cls(whole, text_size, found.audio, dtype, device)

    @property
    def work_bytes(self) -> int:
        """The memory of the parts before the first layer, the states, and the output of every layer."""
        states = self._largest.num_units * self._state_size * (_COPIES + self._part.depth)
        return (self._numbers_before() + states) * max(4, self._dtype.itemsize)

    @property
    def _state_size(self) -> int:
        return int(self._part.config.audio_config.hidden_size)

    def _numbers_before(self) -> int:
        """The numbers of the frames under all channels of the first convolution."""
        channels: int = max(self._part.config.audio_config.subsampling_conv_channels)
        return self._num_bins * self._largest.grid[0] * channels

    def _sample(self) -> tuple[MediaItem, int]:
        """A second of silence."""
        layout = self._processor.layout(self._processor.sample_rate)
        return MediaItem(b"", "audio", 0, layout.num_vectors, (), layout.grid, layout.num_units), layout.num_bytes

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """The frames, each with its bins: [frames, bins] float32."""
        shape = (self._num_bins, item.layout[0] if item.layout else 0)
        if not data or 4 * math.prod(shape) != len(data):
            raise ValueError(f"{len(data)} bytes are not a sound of shape {list(shape)}")
        return (torch.frombuffer(data, dtype=torch.float32).view(shape).T.contiguous().to(self._device),)

    def _features(self, item: MediaItem, values: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, len(values), dtype=torch.bool, device=self._device)
        found: torch.Tensor = self._part.model.model.get_audio_features(values[None], mask).pooler_output[0]
        return found


class GraniteSpeechSounds(TransformersSounds):
    """The encoder of Granite Speech. States attend to those of their own block, whose distances count."""

    @property
    def _state_size(self) -> int:
        return int(self._part.config.encoder_config.hidden_dim)

    def _numbers_before(self) -> int:
        """Scores of a layer, with a bias for each distance."""
        encoder = self._part.config.encoder_config
        blocks = -(-self._largest.num_units // encoder.context_size)
        return 2 * int(encoder.num_heads * blocks * encoder.context_size**2)

    def _features(self, item: MediaItem, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._part.model.get_audio_features(values[None]).pooler_output[0]
        return found
