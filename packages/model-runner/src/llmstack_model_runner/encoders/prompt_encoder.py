"""Base of encoders of items in prompts, of every kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch

from llmstack_media import Processors
from llmstack_model_runner.encoders.sliced_encoder import SlicedEncoder
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind


class PromptEncoder(SlicedEncoder):
    """An encoder whose vectors stand in place of tokens; see `MediaEncoder` for the methods that steps call.

    Attributes:
        prefixes: Of its tensors' names in checkpoints, behind an optional `model.`.
        ignored: Beginnings of names of tensors that nothing here needs.
        is_atomic: See `MediaEncoder`, also for `num_deep`.
        text_class: A class between the text model's and the one with items, which changes how text is computed.
        num_layers: See `MediaEncoder`, also for `max_num_tokens`.
    """

    prefixes: ClassVar[tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    is_atomic: bool = False
    num_deep: int = 0
    text_class: ClassVar[type[Any] | None] = None
    num_layers: Mapping[MediaKind, int]
    max_num_tokens: Mapping[MediaKind, int]

    @classmethod
    @abstractmethod
    def of(
        cls, whole: Mapping[str, Any], text_size: int, found: Processors, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """The encoder of a checkpoint.

        Args:
            whole: The configuration of the whole.
            text_size: Width of the text model's vectors.
            found: How items are prepared.
            dtype: In which it computes.
            device: Where it computes.

        Raises:
            ValueError: The configuration or the processors are not supported.
        """

    @property
    @abstractmethod
    def work_bytes(self) -> int:
        """The most that an item of any kind needs, as `MediaEncoder` says it."""

    @abstractmethod
    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """The input of the first layer, as `MediaEncoder` says it."""

    @abstractmethod
    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """The vectors after the last layer, in the type of the model."""

    def finish_loading(self) -> None:
        """Called once, after the last tensor was loaded."""

    def own_name(self, name: str) -> str | None:
        """The slot's name of a tensor in a checkpoint; None if it belongs to the language model."""
        found = (
            name.removeprefix("thinker.")
            .removeprefix("model.")
            .replace("vision_tower.vision_model.", "vision_tower.", 1)
        )
        return found if found.startswith(self.prefixes) else None
