"""Sound of Voxtral: a tower over windows, and four states joined to each vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from llmstack_media import SoundProcessor
from llmstack_model_runner.encoders.sound_encoder import SoundEncoder
from llmstack_model_runner.encoders.two_linears import TwoLinears
from llmstack_model_runner.encoders.whisper import FrameTower
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.sound_config import TowerFields, audio_fields, read_tower
from llmstack_types import MediaItem

_FIELDS: Final = TowerFields(
    ("hidden_size", 1280), ("intermediate_size", 5120), ("num_hidden_layers", 32), ("num_attention_heads", 20)
)


class VoxtralEncoder(SoundEncoder):
    """An item is a number of whole windows. Four states one after the other are as wide as the feed-forward."""

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: SoundProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        tower = FrameTower("audio_tower.", *read_tower(audio_fields(whole), _FIELDS), dtype, device)
        super().__init__(processor, tower, device)
        largest = processor.largest()
        self._num_joined = largest.num_units // largest.num_vectors
        if tower.inner_size != self._num_joined * tower.size:
            raise ValueError(f"audio_config.intermediate_size must be {self._num_joined} times hidden_size.")
        if largest.num_units % tower.num_states:
            raise ValueError("audio_config.max_source_positions and chunk_length of the feature extractor differ.")
        self._project = TwoLinears(whole, tower.inner_size, text_size, dtype, device, has_bias=False)
        self._parts = (tower, self._project)

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for every four states."""
        joined = self._tower.norm(state[0]).view(-1, self._num_joined * self._tower.size)
        return self._project(joined)
