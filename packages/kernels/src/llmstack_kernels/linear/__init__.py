"""Linear layers whose weight is packed once for the processor at hand."""

from __future__ import annotations

from typing import Protocol

import torch

from llmstack_kernels.dispatch import implementation


class PackedLinear(Protocol):
    """A weight and a bias ready to be applied; it owns its copy, the tensors it was packed from may be dropped."""

    @property
    def in_features(self) -> int:
        """Length of an input row."""

    @property
    def out_features(self) -> int:
        """Length of an output row."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b: [..., in_features] to [..., out_features], in the weight's type."""


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    """Pack a weight [out_features, in_features] and an optional bias [out_features]."""
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out_features, in_features], got {tuple(weight.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias of shape {tuple(bias.shape)} does not fit {weight.shape[0]} outputs.")
    packed: PackedLinear = implementation("linear", weight.device.type).pack_linear(weight, bias)
    return packed


def linear(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    """Apply a packed layer: [..., in_features] to [..., out_features]."""
    if x.shape[-1] != packed.in_features:
        raise ValueError(f"rows of {x.shape[-1]} do not fit a layer of {packed.in_features} inputs.")
    return packed(x)
