"""Base of encoders of pictures and of sound that run some layers at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.layers.weight_slot import HasSlots, WeightSlot, collect_slots
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_types import MediaItem
from llmstack_types.media import num_slices

SLICE_UNITS = 128
"""Units of a slice on a CPU: as few as its products compute at their full rate."""


class SlicedEncoder(ABC):
    """Layers over the rows of an item, each computed whole or in slices; see `MediaEncoder`.

    Subclasses set `_parts`, everything that has weights.
    """

    _parts: Sequence[HasSlots]

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.slice_units = SLICE_UNITS if device.type == "cpu" else 0

    @abstractmethod
    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        """Layer `number`, over the hidden states that are the first of the state."""

    def _behind_layer(self, state: EncoderState, number: int) -> EncoderState:
        """The state with what is made of the hidden states behind layer `number`, if anything is."""
        return state

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors, by names without what only some checkpoints write before them."""
        return collect_slots(self._parts)

    @property
    def num_weights(self) -> int:
        """All of them: those that few units pass, such as the connector's, are few beside the layers'."""
        return sum(slot.num_elements for slot in self.slots().values())

    def positions(self, item: MediaItem) -> torch.Tensor | None:
        """Positions on three axes; None where places are positions."""
        return None

    def run_layers(self, item: MediaItem, state: EncoderState, first: int, count: int) -> EncoderState:
        """The state after so many layers from number `first` on, slices counted.

        Within a layer, the second and third of the state are the room of `LayerRun.begin`.
        """
        slices = num_slices(item.num_units, self.slice_units)
        for number in range(first, first + count):
            state = self._run_slice(item, state, *divmod(number, slices), slices)
        return state

    def _run_slice(self, item: MediaItem, state: EncoderState, number: int, index: int, slices: int) -> EncoderState:
        hidden, *rest = state
        begun, rest = (rest[:2], rest[2:]) if index else ([], rest)
        run = self._layer(item, (hidden, *rest), number)
        if slices == 1:
            return self._behind_layer((run.whole(hidden), *rest), number)
        projected, behind = begun or run.begin(hidden)
        run.fill(hidden, projected, behind, index, slices)
        if index + 1 < slices:
            return (hidden, projected, behind, *rest)
        return self._behind_layer((behind, *rest), number)
