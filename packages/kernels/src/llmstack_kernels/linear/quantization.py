"""Weights as small integers with a scale per group of inputs: weight = integer * scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights become integers.

    Attributes:
        lowest: The smallest integer.
        largest: The one that a group's largest weight becomes.
        group_size: Inputs that share a scale of 16 bits.
        shares: Of a group's largest weight, which the integers may be stretched over; the one with the least square
            error is taken.
    """

    lowest: int
    largest: int
    group_size: int
    shares: tuple[float, ...]

    @property
    def num_bits(self) -> int:
        """Of an integer."""
        return self.largest.bit_length() + 1


# Four bits need small groups for a close fit, where a scale costs half a bit per weight.
_SCHEMES = {
    "int8": Scheme(-127, 127, 128, (1.0,)),
    "int4": Scheme(-8, 7, 32, (1.0, 0.94, 0.88, 0.82)),
}
QUANTIZATIONS = tuple(_SCHEMES)

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


def find_scheme(name: str) -> Scheme:
    """One of `QUANTIZATIONS`; ValueError if it is none."""
    if name not in _SCHEMES:
        raise ValueError(f"quantization {name[:64]!r} is unknown; use {' or '.join(_SCHEMES)}.")
    return _SCHEMES[name]


def bits_per_weight(scheme: str) -> float:
    """What a weight takes, its part of a scale included; ValueError if there is no such scheme."""
    found = find_scheme(scheme)
    return found.num_bits + 16 / found.group_size


def empty_quantized(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Room for a weight's integers and scales; ValueError if there is no such scheme."""
    group_size = find_scheme(scheme).group_size
    out_features, in_features = weight.shape
    integers = torch.empty(out_features, in_features, dtype=torch.int8, device=weight.device)
    num_groups = -(-in_features // group_size)
    scales = torch.empty(out_features, num_groups, dtype=torch.bfloat16, device=weight.device)
    return QuantizedWeight(scheme, integers, scales, group_size)


def quantize(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Round a weight [out_features, in_features] to the nearest of `scheme`; ValueError if there is no such scheme.

    Integers are chosen for the rounded scale, so rounding the scale costs nothing.
    """
    rounding, quantized = find_scheme(scheme), empty_quantized(weight, scheme)
    out_features, in_features = weight.shape
    num_groups = quantized.scales.shape[1]
    padding = num_groups * rounding.group_size - in_features
    num_rows = max(1, _CHUNK_SIZE // in_features)
    for start in range(0, out_features, num_rows):
        rows = slice(start, start + num_rows)
        groups = F.pad(weight[rows].float(), (0, padding)).reshape(-1, rounding.group_size)
        scales = _choose_scales(groups, rounding)
        integers = _round(groups, scales, rounding).view(-1, in_features + padding)
        quantized.integers[rows] = integers[:, :in_features]
        quantized.scales[rows] = scales.view(-1, num_groups)
    return quantized


def _choose_scales(groups: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The bfloat16 scales of the least square error: [num_groups, group_size] to [num_groups, 1]."""
    tops = torch.maximum(groups.amax(1, keepdim=True), -groups.amin(1, keepdim=True))
    candidates = [(tops * (share / scheme.largest)).bfloat16() for share in scheme.shares]
    if len(candidates) == 1:
        return candidates[0]
    errors = torch.cat([_square_error(groups, scales, scheme) for scales in candidates], 1)
    return torch.cat(candidates, 1).gather(1, errors.argmin(1, keepdim=True))


def _round(groups: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Integers like `groups`, still as floats; a group with scale 0 gets zeros."""
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    return (groups * inverse).round_().clamp_(scheme.lowest, scheme.largest)


def _square_error(groups: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """How far from `groups` that is what the integers stand for: [num_groups, 1]."""
    return _round(groups, scales, scheme).mul_(scales.float()).sub_(groups).square_().sum(1, keepdim=True)
