"""Pictures and sound of Qwen2.5-Omni's thinker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from llmstack_media import Processors, SoundProcessor
from llmstack_model_runner.encoders.qwen_vl import OMNI, QwenForm
from llmstack_model_runner.encoders.several import SeveralEncoders
from llmstack_model_runner.encoders.sound_encoder import SoundEncoder
from llmstack_model_runner.encoders.whisper import FrameTower
from llmstack_model_runner.layers import Linear
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.config_values import read_int
from llmstack_model_runner.models.qwen_vl import Qwen2_5VLEncoder, ThreeAxes
from llmstack_model_runner.models.sound_config import audio_fields, read_tower
from llmstack_types import MediaItem

_LONGEST_WAVE = 10_000.0
"""Of the sines that are the positions of states."""


class OmniPictures(Qwen2_5VLEncoder):
    """The tower of Qwen2.5-VL, with layers for queries, keys and values apart."""

    form: ClassVar[QwenForm] = OMNI


class OmniSounds(SoundEncoder):
    """Windows of two seconds, of which each is convolved and attends by itself; two states averaged to each vector.

    Positions of its tokens are places, as those of text.
    """

    prefixes: ClassVar[tuple[str, ...]] = ("audio_tower.",)
    ignored: tuple[str, ...] = ("audio_tower.audio_bos_eos_token.",)

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: SoundProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        config = audio_fields(whole)
        sizes, layer = read_tower(config)
        sizes = sizes._replace(num_states=read_int(config, "n_window", 100))
        if read_int(config, "output_dim", 3584) != text_size:
            raise ValueError(f"audio_config.output_dim must be that of the text model's vectors, {text_size}.")
        tower = FrameTower(
            "audio_tower.", sizes, layer, dtype, device,
            norm="ln_post", positions=_sines(sizes.num_states, layer.size),
        )  # fmt: skip
        super().__init__(processor, tower, device)
        self._projector = Linear(
            tower.size, {"audio_tower.proj": text_size}, has_bias=True, dtype=dtype, device=device, keeps_precision=True
        )
        self._parts = (tower, self._projector)

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """One vector for every two states, whatever window they are of; a single one at the end has none."""
        return self._projector(self._pairs(state))


class Qwen2_5OmniEncoder(SeveralEncoders):
    """Both encoders of a thinker. What speaks is another model, which is not loaded."""

    text_class: ClassVar[type[Any] | None] = ThreeAxes

    @classmethod
    def of(
        cls, whole: Mapping[str, Any], text_size: int, found: Processors, dtype: torch.dtype, device: torch.device
    ) -> Self:
        arguments = (whole, text_size, found, dtype, device)
        return cls((OmniPictures.of(*arguments), OmniSounds.of(*arguments)), device)


def _sines(num_states: int, size: int) -> torch.Tensor:  # [num_states, size]
    """Sines, then cosines, of places times frequencies, as transformers computes them."""
    step = math.log(_LONGEST_WAVE) / (size // 2 - 1)
    angles = torch.arange(num_states)[:, None] * torch.exp(-step * torch.arange(size // 2).float())[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=1)
