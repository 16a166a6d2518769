"""Protocol of a model's encoder of pictures, sounds or videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind

EncoderState = tuple[torch.Tensor, ...]
"""What an encoder has of one item between two of its layers, or between two slices of one.

What is there is never changed in place. Only rows that later slices compute are, which nothing reads before.
"""


class MediaEncoder(Protocol):
    """An encoder that is run some layers at a time, one item at a time.

    Every method is a function of its arguments alone: the vectors of an item depend on nothing but the item, however
    its layers are spread over steps and whatever else these compute. So a failed part can be computed again.
    """

    @property
    def num_layers(self) -> Mapping[MediaKind, int]:
        """The layers of each kind that it encodes; at least 1 each."""
        ...

    @property
    def slice_units(self) -> int:
        """Units of a slice of a layer; 0 for layers that are computed whole. See `MediaSpec`."""
        ...

    @property
    def num_weights(self) -> int:
        """Numbers that every unit is multiplied with on its way through; 0 if that is unknown."""
        ...

    @property
    def max_num_tokens(self) -> Mapping[MediaKind, int]:
        """The places of the largest item of each kind in a prompt."""
        ...

    @property
    def is_atomic(self) -> bool:
        """Whether the tokens of an item attend to each other, so that one step computes all of them."""
        ...

    @property
    def num_deep(self) -> int:
        """The first decoder layers behind which an item's hidden states are added vectors of their own."""
        ...

    @property
    def work_bytes(self) -> int:
        """Upper estimate of what the largest item needs while it is encoded, besides weights and vectors."""
        ...

    def positions(self, item: MediaItem) -> torch.Tensor | None:  # [3, item.num_tokens] int64
        """Positions of the item's tokens on three axes, from that of its first one on.

        What follows the item goes on behind the largest of them. None where its places are its positions.
        """
        ...

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """The input of the first layer. `data` is the item's memory; its content is not checked yet.

        Raises:
            ValueError: The bytes are no such item; the message is one sentence.
        """
        ...

    def run_layers(self, item: MediaItem, state: EncoderState, first: int, count: int) -> EncoderState:
        """The state after so many layers from number `first` on, slices counted."""
        ...

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """The vectors after the last layer, [item.num_vectors, size], in the type of the model.

        Behind each stand those for the first decoder layers, so a row has `1 + num_deep` times the size.
        """
        ...
