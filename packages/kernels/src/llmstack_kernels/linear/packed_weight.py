"""Packed weights apart from their layers, to be kept and computed with later."""

from __future__ import annotations

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
