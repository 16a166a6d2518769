"""Packed weights apart from their layers, to be kept and computed with later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A packed weight as it lies in memory; only the variant that packed it computes with it.

    Attributes:
        shape: [out_features, in_features].
        dtype: The type of the inputs.
        scheme: How it is rounded, or "".
        group_size: Inputs with the same scale; 0 where there are no groups.
        tensors: Panels, then scales or corrections, then zero points or a table: contiguous, not to be changed.
        order: int32 [in_features] where columns are permuted: the input that each is for.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    scheme: str
    group_size: int
    tensors: tuple[torch.Tensor, ...]
    order: torch.Tensor | None = None


class SizedLinear:
    """Base of packed layers, which have two sizes.

    Attributes:
        in_features: Length of an input row.
        out_features: Length of an output row.
    """

    __slots__ = ("in_features", "out_features")

    def __init__(self, shape: Sequence[int]) -> None:
        """`shape` is that of the weight: [out_features, in_features]."""
        self.out_features, self.in_features = shape
