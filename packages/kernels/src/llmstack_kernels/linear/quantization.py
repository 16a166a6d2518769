"""Weights as small integers with a scale per group of inputs: weight = integer * scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Scheme to largest integer and inputs per group. A scale costs 16 bits: an eighth of a bit per weight at 128, and half a
# bit at 32, which 4-bit weights need for a close fit.
_SCHEMES = {"int8": (127, 128), "int4": (7, 32)}
QUANTIZATIONS = tuple(_SCHEMES)

# Shares of a group's largest weight that 4 bits are stretched over; the one with the least square error is taken.
_INT4_SHARES = (1.0, 0.94, 0.88, 0.82)


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


def quantize(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Round a weight [out_features, in_features] to the nearest of `scheme`; ValueError if there is no such scheme.

    Integers are chosen for the rounded scale, so rounding the scale costs nothing.
    """
    if scheme not in _SCHEMES:
        raise ValueError(f"quantization {scheme!r} is unknown; use {' or '.join(_SCHEMES)}.")
    largest, group_size = _SCHEMES[scheme]
    out_features, in_features = weight.shape
    padding = -in_features % group_size
    groups = torch.nn.functional.pad(weight.float(), (0, padding)).view(out_features, -1, group_size)
    shares = _INT4_SHARES if scheme == "int4" else (1.0,)
    integers, scales = _round(groups, largest, shares[0])
    error = _square_error(groups, integers, scales)
    for share in shares[1:]:
        other_integers, other_scales = _round(groups, largest, share)
        other_error = _square_error(groups, other_integers, other_scales)
        is_better = other_error < error
        integers = torch.where(is_better, other_integers, integers)
        scales = torch.where(is_better, other_scales, scales)
        error = torch.minimum(error, other_error)
    flat = integers.view(out_features, -1)[:, :in_features].contiguous()
    return QuantizedWeight(scheme, flat, scales.squeeze(-1).contiguous(), group_size)


def _round(groups: torch.Tensor, largest: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 integers like `groups` and bfloat16 scales [out_features, num_groups, 1]; groups of zeros get scale 0."""
    scales = (groups.abs().amax(-1, keepdim=True) * (share / largest)).bfloat16()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    lowest = -largest - (largest == 7)  # 4 bits have one integer more below zero
    return (groups * inverse).round_().clamp_(lowest, largest).to(torch.int8), scales


def _square_error(groups: torch.Tensor, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (integers * scales.float()).sub_(groups).square_().sum(-1, keepdim=True)
