"""Layers whose inputs are rounded a segment at a time, for weights of few bits.

A segment is a run of 32 inputs, or of 16 where a group of weights has so few. Its products are sums of integers, which
are exact; segments are added in float32, in order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.block_weight import BLOCK_TYPES, BlockWeight
from llmstack_kernels.linear.packed_weight import SizedLinear
from llmstack_kernels.linear.reference import finish
from llmstack_kernels.linear.stored_weight import StoredWeight

__all__ = ["INT4_DYNAMIC", "SegmentLinear", "fits_segments", "round_segments", "segment_of"]

INT4_DYNAMIC = "int4_dynamic"
_SEGMENT = 32
_LARGEST = 127
_SMALLEST = 1e-30
"""Segments without a larger input become zeros, since 127 divided by their largest would be infinite."""


def segment_of(weight: StoredWeight | BlockWeight) -> int:
    """Inputs of the weight that are rounded together."""
    return BLOCK_TYPES[weight.block_type].segment if isinstance(weight, BlockWeight) else _SEGMENT


def fits_segments(weight: StoredWeight) -> bool:
    """Whether each segment has one scale of integers: groups are whole segments, or all inputs are one group."""
    is_integer = weight.layout in ("int4", "int8") and not weight.has_float_zeros
    return is_integer and (weight.scales.shape[1] == 1 or weight.group_size % _SEGMENT == 0)


def round_segments(rows: torch.Tensor, segment: int) -> torch.Tensor:
    """Rows of which each segment is an integer within ±127 times a scale, which its largest input makes 127.

    float32 [n, in_features]; a segment with NaN or infinity is NaN.
    """
    in_features = rows.shape[1]
    wide = F.pad(rows.float(), (0, -in_features % segment)).unflatten(1, (-1, segment))
    tops = wide.abs().amax(2, keepdim=True)
    # A number divided by a tensor would be its reciprocal times the number, which is rounded twice.
    inverse = torch.where(tops > _SMALLEST, torch.full_like(tops, _LARGEST) / tops, 0.0)
    rounded = (wide * inverse).round_() * (tops / _LARGEST)
    is_finite = tops.isfinite()
    return torch.where(is_finite, rounded, torch.nan).flatten(1)[:, :in_features]


class SegmentLinear(SizedLinear):
    """The reference: rounded inputs and the weight that the numbers stand for, multiplied in float64."""

    __slots__ = ("_bias", "_order", "_segment", "_weight")

    def __init__(self, weight: StoredWeight | BlockWeight, bias: torch.Tensor | None) -> None:
        stored = weight.stored() if isinstance(weight, BlockWeight) else weight
        self._order = stored.order  # segments are those of the columns of the numbers
        dense = stored.dequantize(torch.float32)
        super().__init__(dense.shape)
        self._weight = dense if self._order is None else dense[:, self._order]
        self._segment = segment_of(weight)
        self._bias = None if bias is None else bias.float()

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        rows = x.reshape(-1, self.in_features)
        rounded = round_segments(rows if self._order is None else rows[:, self._order], self._segment)
        out = (rounded.double() @ self._weight.double().t()).float()
        if self._bias is not None:
            out = out + self._bias
        dtype = out_dtype or x.dtype
        return finish(out.to(dtype).view(*x.shape[:-1], self.out_features), activation, residual, out_dtype)
