"""Layers whose inputs are rounded too, row by row: products of 8-bit integers.

output = sum of integer products * (scale of the row * scale of the output). The sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.linear.packed_weight import SizedLinear
from llmstack_kernels.linear.reference import finish
from llmstack_kernels.linear.stored_weight import StoredWeight

__all__ = ["INT8_DYNAMIC", "DynamicLinear", "DynamicWeight", "as_dynamic", "round_rows", "round_weight"]

INT8_DYNAMIC = "int8_dynamic"
_LARGEST = 127
_SMALLEST = 1e-30
"""Rows without a larger input become zeros, since 127 divided by their largest would be infinite."""

_MAX_INPUTS = 1 << 17
"""Most inputs: with more, a sum of products might exceed 32 bits."""

_CHUNK_SIZE = 1 << 20  # weights that are rounded at once, which bounds the memory


@dataclass(frozen=True, slots=True)
class DynamicWeight:
    """A weight [out_features, in_features] in integers.

    Attributes:
        integers: int8 [out_features, in_features].
        scales: float32 [out_features].
    """

    integers: torch.Tensor
    scales: torch.Tensor


def round_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers within ±127 and a scale for each row: float32 [n, in_features] and [n].

    The largest of a row becomes 127. A row with NaN or infinity gets zeros and the scale NaN.
    """
    wide = rows.float()
    tops = wide.abs().amax(1)
    is_finite = tops.isfinite()
    # A number divided by a tensor would be its reciprocal times the number, which is rounded twice.
    inverse = torch.where((tops > _SMALLEST) & is_finite, torch.full_like(tops, _LARGEST) / tops, 0.0)
    integers = torch.where(is_finite[:, None], (wide * inverse[:, None]).round_(), 0.0)
    return integers, torch.where(is_finite, tops / _LARGEST, torch.nan)


def round_weight(weight: torch.Tensor) -> DynamicWeight:
    """The nearest integers, each output with a scale of its own."""
    out_features, in_features = weight.shape
    if in_features > _MAX_INPUTS:
        raise ValueError(f"{INT8_DYNAMIC} is supported for up to {_MAX_INPUTS} inputs, and a layer has {in_features}.")
    integers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(out_features, dtype=torch.float32, device=weight.device)
    num_rows = max(1, _CHUNK_SIZE // in_features)
    for start in range(0, out_features, num_rows):
        chunk = slice(start, start + num_rows)
        rounded, scales[chunk] = round_rows(weight[chunk])
        integers[chunk] = rounded.to(torch.int8)
    return DynamicWeight(integers, scales)


def as_dynamic(weight: StoredWeight) -> DynamicWeight | None:
    """The same integers; None unless they are symmetric, of 8 bits, and an output has one scale."""
    is_alike = weight.layout == "int8" and weight.zeros is None and weight.order is None
    if not is_alike or weight.scales.shape[1] != 1 or weight.shape[1] > _MAX_INPUTS:
        return None
    return DynamicWeight((weight.numbers ^ 128).view(torch.int8).contiguous(), weight.scales[:, 0].float().contiguous())


class DynamicLinear(SizedLinear):
    """The reference: sums of integers in float64, which holds them exactly."""

    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, weight: DynamicWeight, bias: torch.Tensor | None) -> None:
        super().__init__(weight.integers.shape)
        self._weight = weight.integers
        self._scales = weight.scales
        self._bias = None if bias is None else bias.float()

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        integers, row_scales = round_rows(x.reshape(-1, self.in_features))
        sums = (integers.double() @ self._weight.double().t()).float()
        out = sums * (row_scales[:, None] * self._scales)
        if self._bias is not None:
            out = out + self._bias
        dtype = out_dtype or x.dtype
        return finish(out.to(dtype).view(*x.shape[:-1], self.out_features), activation, residual, out_dtype)
