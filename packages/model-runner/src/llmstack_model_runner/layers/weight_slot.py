"""Weight slots: the tensors that a model expects from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from llmstack_kernels.linear import StoredWeight


class WeightKind(Enum):
    """Role of a tensor, which decides its values in dummy weights."""

    MATRIX = "matrix"
    SCALE = "scale"
    BIAS = "bias"


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One expected tensor.

    Attributes:
        shape: Shape in the checkpoint.
        load: Loads the tensor, in any floating type, on the CPU or on the model's device. It is called once and may
            keep the tensor.
        load_stored: The same for a quantized weight [out_features, in_features]; None where none is supported.
        stored_shape: Its shape, where it is not `shape`.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    kind: WeightKind = WeightKind.MATRIX
    load_stored: Callable[[StoredWeight], None] | None = None
    stored_shape: tuple[int, ...] | None = None

    def fits(self, tensor: torch.Tensor | StoredWeight) -> bool:
        """Whether `tensor` has the shape; a single number may have any number of dimensions."""
        if isinstance(tensor, StoredWeight):
            return tuple(tensor.shape) == (self.stored_shape or self.shape)
        return tuple(tensor.shape) == self.shape or (self.shape == () and tensor.numel() == 1)

    def put(self, tensor: torch.Tensor | StoredWeight) -> None:
        """Loads a tensor or a quantized weight; ValueError if it is quantized and must not be."""
        if not isinstance(tensor, StoredWeight):
            self.load(tensor)
        elif self.load_stored is not None:
            self.load_stored(tensor)
        else:
            raise ValueError("is quantized, and only supported in full precision")


class HasSlots(Protocol):
    """A part of a model that owns weights."""

    def slots(self) -> dict[str, WeightSlot]:
        """Slots by their names in the checkpoint."""


def collect_slots(parts: Iterable[HasSlots | None]) -> dict[str, WeightSlot]:
    """The slots of all parts that are not None."""
    return {name: slot for part in parts if part is not None for name, slot in part.slots().items()}
