"""Base of mixers of a row's tokens: attention, or layers with a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from llmstack_kernels.state_rows import StateRows
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerStep
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightPart, WeightSlot


class StateTensor(NamedTuple):
    """One tensor of a layer's state, which stands for all tokens together.

    Attributes:
        name: What it is, such as the matrix of a recurrence.
        dtype: The type of its numbers, whatever the type of stored keys and values is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Mixer(ABC):
    """The part of a layer in which a token depends on those before it."""

    @abstractmethod
    def slots(self) -> dict[str, WeightSlot]:
        """Slots of all tensors that it needs."""

    def optional_slots(self) -> dict[str, WeightSlot]:
        """Slots of tensors that only some checkpoints have."""
        return {}

    @abstractmethod
    def __call__(
        self,
        x: torch.Tensor,  # [num_tokens, hidden_size]
        step: LayerStep,
    ) -> torch.Tensor:  # [num_queries, hidden_size]
        """Its output, of the tokens that attend. What later tokens need is written to `step.kv_cache`."""


class MixerSettings(Protocol):
    """Sizes of a mixer."""

    def states(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The tensors of its state, of this context's rank, in a model that computes in `dtype`."""
        ...

    def make(self, prefix: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> Mixer:
        """The mixer of hidden states of `size`, without weights; `prefix` is that of the layer's tensors."""
        ...


def states_of_rows(metadata: AttentionMetadata) -> StateRows:
    """The states that the rows of a step read and write."""
    if metadata.states is None:
        raise ValueError("the rows of the step have no states")
    return metadata.states


def number_slot(
    name: str, target: torch.Tensor, total: int, own: Sequence[range], kind: WeightKind = WeightKind.BIAS
) -> dict[str, WeightSlot]:
    """The slot of a tensor of `total` numbers, of which `target` takes those of this rank."""
    part = None if len(target) == total else WeightPart(0, tuple(own))
    return {name: WeightSlot((total,), partial(_copy, target), kind, part=part)}


def tap_slot(name: str, taps: torch.Tensor, total: int, own: Sequence[range]) -> dict[str, WeightSlot]:
    """The slot of the taps of a convolution over `total` channels; `taps` is [length, own channels] float32."""
    length, num_channels = taps.shape
    part = None if num_channels == total else WeightPart(0, tuple(own))
    return {name: WeightSlot((total, 1, length), partial(_copy_taps, taps), WeightKind.SCALE, part=part)}


def _copy(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


def _copy_taps(taps: torch.Tensor, tensor: torch.Tensor) -> None:
    taps.copy_(tensor[:, 0].T)
