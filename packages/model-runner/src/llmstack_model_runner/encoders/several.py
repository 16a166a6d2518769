"""Encoders of several kinds of items in one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.prompt_encoder import PromptEncoder
from llmstack_model_runner.layers.weight_slot import WeightSlot
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind


class SeveralEncoders(PromptEncoder):
    """Each item is encoded by the one that takes its kind; none of them has vectors for layers."""

    def __init__(self, encoders: Sequence[PromptEncoder], device: torch.device) -> None:
        super().__init__(device)
        self.is_atomic = any(one.is_atomic for one in encoders)
        (self.slice_units,) = {one.slice_units for one in encoders}
        self._encoders = encoders
        self._of_kind: Mapping[MediaKind, PromptEncoder] = {kind: one for one in encoders for kind in one.num_layers}
        self.num_layers = {kind: count for one in encoders for kind, count in one.num_layers.items()}
        self.max_num_tokens = {kind: count for one in encoders for kind, count in one.max_num_tokens.items()}
        self.ignored = tuple(name for one in encoders for name in one.ignored)

    def slots(self) -> dict[str, WeightSlot]:
        return {name: slot for one in self._encoders for name, slot in one.slots().items()}

    def own_name(self, name: str) -> str | None:
        found = (one.own_name(name) for one in self._encoders)
        return next((own for own in found if own is not None), None)

    def finish_loading(self) -> None:
        for one in self._encoders:
            one.finish_loading()

    @property
    def num_weights(self) -> int:
        """The weights that an item passes, of the kind with most of them."""
        return max(one.num_weights for one in self._encoders)

    @property
    def work_bytes(self) -> int:
        return max(one.work_bytes for one in self._encoders)

    def positions(self, item: MediaItem) -> torch.Tensor | None:
        return self._of_kind[item.kind].positions(item)

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        return self._of_kind[item.kind].begin(item, data)

    def run_layers(self, item: MediaItem, state: EncoderState, first: int, count: int) -> EncoderState:
        return self._of_kind[item.kind].run_layers(item, state, first, count)

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        raise NotImplementedError("each encoder runs its own layers")

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        return self._of_kind[item.kind].finish(item, state)
