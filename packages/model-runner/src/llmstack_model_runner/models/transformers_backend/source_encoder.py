"""The encoder of an encoder-decoder of transformers, whose items are prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.layers.weight_slot import WeightSlot
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.transformers_backend.paused_layers import PausedLayers
from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind

_COPIES = 8
"""Tensors of a layer's scores, or of the width of a state, that are alive at once."""


class SourceEncoder:
    """Encodes the tokens of a prompt, one prompt at a time; see `MediaEncoder`.

    The bytes of an item are its token ids, int32. It runs some layers at a time where the code allows that.

    Attributes:
        num_layers: See `MediaEncoder`, also for the others.
    """

    slice_units: ClassVar[int] = 0
    num_weights: ClassVar[int] = 0
    is_atomic: ClassVar[bool] = False
    num_deep: ClassVar[int] = 0

    def __init__(self, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """`sizes`: Tokens of the longest prompt, width of a state, and heads of a layer."""
        self._longest, self._size, self._num_heads = sizes
        self._dtype, self._device = dtype, device
        self.num_layers: Mapping[MediaKind, int] = {"text": 1}
        self.max_num_tokens: Mapping[MediaKind, int] = {"text": self._longest}
        self._code: Any = None
        self._layers: PausedLayers

    def take(self, encoder: Any) -> None:
        """The encoder, with its weights."""
        self._code, self._layers = encoder, PausedLayers(encoder)

    def try_out(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The states of some tokens, [num_tokens, size], which show whether some layers can be run at a time."""
        found = self._layers.try_out(lambda: self._states(token_ids))
        self.num_layers = {"text": self._layers.depth if self._layers.are_paused else 1}
        return found

    def slots(self) -> dict[str, WeightSlot]:
        """None of its own: the whole model is loaded at once."""
        return {}

    @property
    def work_bytes(self) -> int:
        """The scores and states of a layer over the longest prompt."""
        numbers = self._longest * (self._num_heads * self._longest + self._size)
        return _COPIES * numbers * self._dtype.itemsize

    def positions(self, item: MediaItem) -> None:
        """None: places are positions."""

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """The tokens of the prompt."""
        if not data or len(data) != 4 * item.num_units:
            raise ValueError(f"{len(data)} bytes are not {item.num_units} token ids")
        return (torch.frombuffer(data, dtype=torch.int32).long().to(self._device),)

    @torch.inference_mode()
    def run_layers(self, item: MediaItem, state: EncoderState, first: int, count: int) -> EncoderState:
        """The tokens, and the output of every layer so far."""
        token_ids, *known = state
        return (token_ids, *self._layers.run(lambda: self._states(token_ids), known, first + count))

    @torch.inference_mode()
    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:  # [num_units, size]
        """The states that the encoder returns."""
        token_ids, *known = state
        return self._layers.finish(lambda: self._states(token_ids), known)

    def _states(self, token_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._code(input_ids=token_ids[None], return_dict=True).last_hidden_state[0]
        return found
