"""Where one tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch


class WeightKind(Enum):
    """What a tensor does, which decides its values when weights are made up."""

    MATRIX = "matrix"
    SCALE = "scale"
    BIAS = "bias"


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One expected tensor.

    Attributes:
        shape: As it stands in the checkpoint.
        load: Takes the tensor, in any floating type, on the CPU or where the model lies; to be called once. It may keep
            the tensor itself.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    kind: WeightKind = WeightKind.MATRIX

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has the shape; a single number may stand in any number of dimensions."""
        return tuple(tensor.shape) == self.shape or (self.shape == () and tensor.numel() == 1)


class HasSlots(Protocol):
    """A part of a model that owns weights."""

    def slots(self) -> dict[str, WeightSlot]:
        """Name in the checkpoint to slot."""


def collect_slots(parts: Iterable[HasSlots | None]) -> dict[str, WeightSlot]:
    """The slots of all parts that are there."""
    return {name: slot for part in parts if part is not None for name, slot in part.slots().items()}
