"""Sound of Qwen2-Audio: Whisper's tower, and two states averaged to each vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llmstack_media import SoundProcessor
from llmstack_model_runner.encoders.sound_encoder import SoundEncoder
from llmstack_model_runner.encoders.whisper import STRIDE, FrameTower
from llmstack_model_runner.layers import Linear
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.sound_config import audio_fields, read_tower
from llmstack_types import MediaItem


class Qwen2AudioEncoder(SoundEncoder):
    """An item is one window, without the silence behind its sound: no state attends to that.

    Its last frame is behind those of its states, unless the window ends there.
    """

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: SoundProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        tower = FrameTower("audio_tower.", *read_tower(audio_fields(whole)), dtype, device)
        super().__init__(processor, tower, device)
        if processor.largest().num_units != tower.num_states:
            raise ValueError("audio_config.max_source_positions and chunk_length of the feature extractor differ.")
        name = "multi_modal_projector.linear"
        self._projector = Linear(
            tower.size, {name: text_size}, has_bias=True, dtype=dtype, device=device, keeps_precision=True
        )
        self._parts = (tower, self._projector)

    def _states_of(self, num_frames: int) -> int:
        return num_frames // STRIDE

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for every two states; a single one at the end has none."""
        return self._projector(self._pairs(state))
