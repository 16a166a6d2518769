"""Weights of quantized checkpoints, in the layouts that formats are reduced to.

They are not rounded again: weight = (number - zero point) * scale, or table[number] * scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

__all__ = ["STORED_LAYOUTS", "StoredWeight", "join_stored"]

_BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "fp8": 8, "table4": 4}
_MIDDLES: Mapping[str, int] = {layout: 1 << (bits - 1) for layout, bits in _BITS.items()}
STORED_LAYOUTS = tuple(_BITS)
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ZERO_DTYPES = (torch.uint8, torch.float32)
_FP8_NAN = 0x7F
_NUMBERS_AT_ONCE = 1 << 17
"""Numbers that are widened together: caches hold them. All 28 million of a vocabulary's take six times as long."""
_LARGEST_SCALE = 2.0**112
"""Scales of `fp8` are multiplied by a power of two while they are packed, which must not overflow."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [out_features, in_features] as a checkpoint stores it.

    Attributes:
        layout: One of `STORED_LAYOUTS`.
        numbers: uint8 [out_features, in_features], of four bits from 0 to 15; of `fp8`, the bits of float8 e4m3.
        scales: float32, bfloat16 or float16 [out_features, num_groups]; rows may be views of one row.
        group_size: Inputs per group; the last group may have fewer.
        zeros: [out_features, num_groups] of `int8` and `int4`, uint8 or, for formats with a smallest value, float32.
            None means 128 and 8.
        table: float32 [16] of `table4`.
        order: int64 [in_features] where groups are not runs of inputs: the input that each column is for.
    """

    layout: str
    numbers: torch.Tensor
    scales: torch.Tensor
    group_size: int
    zeros: torch.Tensor | None = None
    table: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Checks all shapes and scales, so that kernels need no checks of their own; ValueError in a sentence."""
        if self.layout not in _BITS:
            raise ValueError(f"layout {self.layout[:64]!r} is unknown; {', '.join(STORED_LAYOUTS)} are known.")
        if self.numbers.ndim != 2 or self.numbers.dtype != torch.uint8 or not self.numbers.numel():
            raise ValueError(f"numbers must be uint8 [out_features, in_features], got {tuple(self.numbers.shape)}.")
        out_features, in_features = self.numbers.shape
        if self.group_size < 1 or (self.group_size % 8 and self.group_size < in_features):
            raise ValueError(f"groups of {self.group_size} inputs are not supported; a multiple of 8 is.")
        groups = (out_features, -(-in_features // self.group_size))
        if tuple(self.scales.shape) != groups or self.scales.dtype not in _SCALE_DTYPES:
            raise ValueError(f"scales of shape {tuple(self.scales.shape)} do not fit {groups}.")
        if self.zeros is not None and (tuple(self.zeros.shape) != groups or self.zeros.dtype not in _ZERO_DTYPES):
            raise ValueError(f"zero points of shape {tuple(self.zeros.shape)} do not fit {groups}.")
        if (self.table is None) == (self.layout == "table4"):
            raise ValueError("only and always a weight of layout table4 has a table.")
        _check_values(self)

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight: [out_features, in_features]."""
        return self.numbers.shape

    @property
    def num_bits(self) -> int:
        """Bits of a number."""
        return _BITS[self.layout]

    @property
    def has_float_zeros(self) -> bool:
        """Whether zero points are no integers."""
        return self.zeros is not None and self.zeros.dtype == torch.float32

    @property
    def ndim(self) -> int:
        """A weight is a matrix, as tensors of weights are."""
        return 2

    def rows(self, index: torch.Tensor | slice) -> StoredWeight:
        """The outputs that `index` selects."""
        zeros = None if self.zeros is None else self.zeros[index]
        return replace(self, numbers=self.numbers[index], scales=self.scales[index], zeros=zeros)

    def columns(self, inputs: range) -> StoredWeight | None:
        """The inputs of a run, with smaller groups where it begins inside one; None where no group size fits."""
        if self.order is not None:
            return None
        num_groups = self.scales.shape[1]
        size = self.group_size if num_groups == 1 else math.gcd(self.group_size, inputs.start)
        if size % 8 and size < len(inputs):
            return None
        copies = 1 if num_groups == 1 else self.group_size // size
        first = 0 if num_groups == 1 else inputs.start // size
        groups = slice(first, first + -(-len(inputs) // size))
        scales = self.scales.repeat_interleave(copies, 1)[:, groups]
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(copies, 1)[:, groups]
        numbers = self.numbers[:, inputs.start : inputs.stop]
        return replace(self, numbers=numbers, scales=scales, zeros=zeros, group_size=size)

    def to(self, device: torch.device) -> StoredWeight:
        """The weight on another device."""
        zeros, table, order = (
            None if value is None else value.to(device) for value in (self.zeros, self.table, self.order)
        )
        numbers, scales = self.numbers.to(device), self.scales.to(device)
        return replace(self, numbers=numbers, scales=scales, zeros=zeros, table=table, order=order)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the numbers represent, rounded once from float32: [out_features, in_features]."""
        weight = torch.empty(self.shape, dtype=dtype, device=self.numbers.device)
        step = max(1, _NUMBERS_AT_ONCE // self.shape[1])
        for start in range(0, self.shape[0], step):
            weight[start : start + step] = self._widened(slice(start, start + step))
        return weight if self.order is None else weight[:, torch.argsort(self.order)]

    def zero_points(self) -> torch.Tensor:
        """The zero points of all groups: [out_features, num_groups]."""
        if self.zeros is not None:
            return self.zeros
        return torch.full(self.scales.shape, _MIDDLES[self.layout], dtype=torch.uint8, device=self.scales.device)

    def _widened(self, rows: slice) -> torch.Tensor:
        """The weights of some outputs in float32, with inputs in the order of columns."""
        in_features = self.shape[1]
        group_size = min(self.group_size, in_features)
        groups = F.pad(self.numbers[rows], (0, -in_features % group_size)).unflatten(1, (-1, group_size))
        values: torch.Tensor
        if self.layout == "fp8":
            values = groups.view(torch.float8_e4m3fn).float()
        elif self.table is not None:
            values = self.table[groups.int()]
        else:
            values = groups.float()
            values -= _MIDDLES[self.layout] if self.zeros is None else self.zeros[rows].float()[..., None]
        values *= self.scales[rows].float()[..., None]
        return values.flatten(1)[:, :in_features]

    def num_bytes(self) -> int:
        """Bytes of numbers, scales and zero points when packed."""
        zeros = self.zero_points().nbytes if self.layout.startswith("int") else 0
        return self.numbers.numel() * _BITS[self.layout] // 8 + self.scales.nbytes + zeros


def join_stored(parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """The outputs of all parts, one after another; None where they cannot be one weight."""
    first = parts[0]
    if not all(_is_alike(first, part) for part in parts[1:]):
        return None
    zeros = None
    if any(part.zeros is not None for part in parts):
        zero_points = [part.zero_points() for part in parts]
        if any(part.has_float_zeros for part in parts):
            zero_points = [zeros.float() for zeros in zero_points]
        zeros = torch.cat(zero_points)
    numbers, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("numbers", "scales"))
    return replace(first, numbers=numbers, scales=scales, zeros=zeros)


def _is_alike(first: StoredWeight, other: StoredWeight) -> bool:
    return (
        (first.layout, first.shape[1], first.group_size, first.scales.dtype)
        == (other.layout, other.shape[1], other.group_size, other.scales.dtype)
        and _is_equal(first.table, other.table)
        and _is_equal(first.order, other.order)
    )


def _is_equal(first: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if first is None or other is None:
        return first is other
    return torch.equal(first, other)


def _largest_number(weight: StoredWeight) -> int:
    largest = int(weight.numbers.amax())
    return largest if weight.zeros is None or weight.has_float_zeros else max(largest, int(weight.zeros.amax()))


def _check_values(weight: StoredWeight) -> None:
    in_features = weight.shape[1]
    if not weight.scales.isfinite().all():
        raise ValueError("a scale is NaN or infinite.")
    if weight.has_float_zeros and weight.zeros is not None and not weight.zeros.isfinite().all():
        raise ValueError("a zero point is NaN or infinite.")
    if weight.layout == "fp8":
        if weight.scales.abs().amax() >= _LARGEST_SCALE:
            raise ValueError("a scale is too large.")
        if ((weight.numbers & _FP8_NAN) == _FP8_NAN).any():
            raise ValueError("a weight is NaN.")
    if _BITS[weight.layout] == 4 and _largest_number(weight) > 15:
        raise ValueError("a number does not fit into four bits.")
    table = weight.table
    if table is not None and (table.shape != (16,) or table.dtype != torch.float32 or not table.isfinite().all()):
        raise ValueError("the table is not 16 finite numbers.")
    order = weight.order
    if order is not None:
        wanted = torch.arange(in_features, device=order.device)
        if order.shape != (in_features,) or not torch.equal(order.sort().values, wanted):
            raise ValueError("the order of inputs is no permutation.")
