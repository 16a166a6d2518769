"""Where one tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

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
        load: Takes the tensor, in any floating type, on the CPU; to be called once. It may keep the tensor itself.
    """

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    kind: WeightKind = WeightKind.MATRIX
