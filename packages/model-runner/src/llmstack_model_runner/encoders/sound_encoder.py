"""Base of encoders of sound in chats: a tower over frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from llmstack_media import Processors, SoundProcessor
from llmstack_model_runner.encoders.image_encoder import num_places
from llmstack_model_runner.encoders.prompt_encoder import PromptEncoder
from llmstack_model_runner.encoders.whisper import FrameEncoder, FrameTower
from llmstack_model_runner.media.encoder import EncoderState


class SoundEncoder(FrameEncoder, PromptEncoder):
    """A tower over sound and the projector behind it."""

    prefixes: ClassVar[tuple[str, ...]] = ("audio_tower.", "multi_modal_projector.")

    def __init__(self, processor: SoundProcessor, tower: FrameTower, device: torch.device) -> None:
        """Raises ValueError where spectrograms have other sizes than the tower reads."""
        super().__init__(device)
        if processor.log_mel.num_bins != tower.num_bins:
            raise ValueError(
                f"Sound is prepared in {processor.log_mel.num_bins} mel bins, and audio_config.num_mel_bins is "
                f"{tower.num_bins}."
            )
        self._tower = tower
        largest = processor.largest()
        self._set_sizes(largest.num_units, num_places(processor.placeholders(largest)))

    @classmethod
    def of(
        cls, whole: Mapping[str, Any], text_size: int, found: Processors, dtype: torch.dtype, device: torch.device
    ) -> Self:
        if found.audio is None:
            raise ValueError("How sound is prepared is not known.")
        make: Any = cls  # whose arguments are those of every family
        made: Self = make(whole, text_size, found.audio, dtype, device)
        return made

    def _pairs(self, state: EncoderState) -> torch.Tensor:
        """The mean of every two states, behind the tower's norm; a single state at the end has none."""
        hidden = state[0]
        pairs = hidden[: len(hidden) // 2 * 2].view(-1, 2, hidden.shape[1])
        return self._tower.norm(pairs.mean(1))
