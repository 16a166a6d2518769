"""Linear layers by PyTorch's own matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class PlainLinear:
    """An unpacked weight."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight  # [out_features, in_features]
        self._bias = bias

    @property
    def in_features(self) -> int:
        """Length of an input row."""
        return self._weight.shape[1]

    @property
    def out_features(self) -> int:
        """Length of an output row."""
        return self._weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """X Wᵀ + b."""
        return F.linear(x, self._weight, self._bias)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PlainLinear:
    """Keep weight and bias as they are."""
    return PlainLinear(weight, bias)
