"""Weights as small integers with a scale per group of inputs: weight = integer * scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Scheme to largest integer and inputs per group. A scale costs 16 bits: an eighth of a bit per weight at 128, and half
# a bit at 32, which 4-bit weights need for a close fit.
_SCHEMES = {"int8": (127, 128), "int4": (7, 32)}
QUANTIZATIONS = tuple(_SCHEMES)

# Shares of a group's largest weight that 4 bits are stretched over; the one with the least square error is taken.
_SHARES = {"int8": (1.0,), "int4": (1.0, 0.94, 0.88, 0.82)}

# Weights that are rounded at once: few enough to stay in the cache between the tops, which is 7 times as fast as all at
# once, and bounds the memory.
_CHUNK_SIZE = 1 << 18


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out_features, in_features] in integers.

    Attributes:
        integers: int8 [out_features, in_features], within ±127 or from -8 to 7.
        scales: bfloat16 [out_features, num_groups].
        group_size: Inputs per group; the last group may have fewer.
    """

    scheme: str
    integers: torch.Tensor
    scales: torch.Tensor
    group_size: int

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the integers stand for: [out_features, in_features]."""
        in_features = self.integers.shape[1]
        scales = self.scales.float().repeat_interleave(self.group_size, 1)[:, :in_features]
        return (self.integers * scales).to(dtype)


def bits_per_weight(scheme: str) -> float:
    """What a weight takes, its part of a scale included; ValueError if there is no such scheme."""
    largest, group_size = _scheme(scheme)
    return largest.bit_length() + 1 + 16 / group_size


def quantize(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Round a weight [out_features, in_features] to the nearest of `scheme`; ValueError if there is no such scheme.

    Integers are chosen for the rounded scale, so rounding the scale costs nothing.
    """
    group_size = _scheme(scheme)[1]
    out_features, in_features = weight.shape
    padding = -in_features % group_size
    integers = torch.empty(out_features, in_features, dtype=torch.int8, device=weight.device)
    shape = (out_features, (in_features + padding) // group_size)
    scales = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    num_rows = max(1, _CHUNK_SIZE // in_features)
    for start in range(0, out_features, num_rows):
        rows = slice(start, start + num_rows)
        groups = F.pad(weight[rows].float(), (0, padding)).reshape(-1, group_size)
        chosen = _choose_scales(groups, scheme)
        integers[rows] = _round(groups, chosen, scheme).view(-1, in_features + padding)[:, :in_features]
        scales[rows] = chosen.view(-1, shape[1])
    return QuantizedWeight(scheme, integers, scales, group_size)


def _scheme(name: str) -> tuple[int, int]:
    if name not in _SCHEMES:
        raise ValueError(f"quantization {name[:64]!r} is unknown; use {' or '.join(_SCHEMES)}.")
    return _SCHEMES[name]


def _choose_scales(groups: torch.Tensor, scheme: str) -> torch.Tensor:
    """The bfloat16 scales of the least square error: [num_groups, group_size] to [num_groups, 1]."""
    largest, shares = _SCHEMES[scheme][0], _SHARES[scheme]
    tops = torch.maximum(groups.amax(1, keepdim=True), -groups.amin(1, keepdim=True))
    scales = (tops * (shares[0] / largest)).bfloat16()
    if len(shares) == 1:
        return scales
    error = _error(groups, scales, scheme)
    for share in shares[1:]:
        other_scales = (tops * (share / largest)).bfloat16()
        other_error = _error(groups, other_scales, scheme)
        scales = torch.where(other_error < error, other_scales, scales)
        error = torch.minimum(error, other_error)
    return scales


def _round(groups: torch.Tensor, scales: torch.Tensor, scheme: str) -> torch.Tensor:
    """Integers like `groups`, still as floats; a group with scale 0 gets zeros."""
    largest = _SCHEMES[scheme][0]
    lowest = -largest - (scheme == "int4")  # 4 bits have one integer more below zero
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    return (groups * inverse).round_().clamp_(lowest, largest)


def _error(groups: torch.Tensor, scales: torch.Tensor, scheme: str) -> torch.Tensor:
    """How far from `groups` that is what the integers stand for: [num_groups, 1]."""
    error: torch.Tensor = torch.linalg.vector_norm(
        _round(groups, scales, scheme).mul_(scales.float()).sub_(groups), dim=1, keepdim=True
    )
    return error
