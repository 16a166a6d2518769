"""Quantized weights: small numbers with a scale per group of inputs.

weight = number * scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.stored_weight import StoredWeight


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights become integers, or the numbers of a small floating-point type.

    Attributes:
        lowest: The smallest number.
        largest: The one that a group's largest weight becomes.
        num_bits: Bits of a number.
        group_size: Inputs that share a scale of 16 bits; None means all inputs of an output.
        shares: Of a group's largest weight, which the numbers may be stretched over; the one with the least square
            error is taken.
        dtype: That numbers are stored in.
    """

    lowest: int
    largest: int
    num_bits: int
    group_size: int | None
    shares: tuple[float, ...] = (1.0,)
    dtype: torch.dtype = torch.int8


# Four bits need small groups for a close fit, where a scale costs half a bit per weight. Floating-point numbers are as
# close to a small weight as to a large one, so one scale does for all inputs.
_SCHEMES = {
    "int8": Scheme(-127, 127, 8, 128),
    "int4": Scheme(-8, 7, 4, 32, (1.0, 0.94, 0.88, 0.82)),
    "fp8": Scheme(-448, 448, 8, None, dtype=torch.float8_e4m3fn),
}
QUANTIZATIONS = tuple(_SCHEMES)

# Weights that are rounded at once: few enough to stay in the cache between the tops, which is 7 times as fast as all at
# once, and bounds the memory.
_CHUNK_SIZE = 1 << 18


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight [out_features, in_features].

    Attributes:
        scheme: One of `QUANTIZATIONS`.
        integers: int8 [out_features, in_features], within ±127 or from -8 to 7; of `fp8`, float8_e4m3fn.
        scales: bfloat16 [out_features, num_groups].
        group_size: Inputs per group; the last group may have fewer.
    """

    scheme: str
    integers: torch.Tensor
    scales: torch.Tensor
    group_size: int

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight that the numbers represent: [out_features, in_features]."""
        in_features = self.integers.shape[1]
        scales = self.scales.float().repeat_interleave(self.group_size, 1)[:, :in_features]
        return (self.integers.float() * scales).to(dtype)

    def stored(self) -> StoredWeight:
        """The same numbers, as a checkpoint would store them."""
        numbers = self.integers.view(torch.uint8)
        if self.scheme != "fp8":
            numbers = numbers + (1 << (find_scheme(self.scheme).num_bits - 1))
        return StoredWeight(self.scheme, numbers, self.scales, self.group_size)


def find_scheme(name: str) -> Scheme:
    """One of `QUANTIZATIONS`; ValueError if it is none."""
    if name not in _SCHEMES:
        raise ValueError(
            f"quantization {name[:64]!r} is unknown; use {', '.join(QUANTIZATIONS[:-1])} or {QUANTIZATIONS[-1]}."
        )
    return _SCHEMES[name]


def bits_per_weight(scheme: str) -> float:
    """Bits per weight, including its share of the group's scale; ValueError for an unknown scheme."""
    if scheme == "int8_dynamic":
        return 8
    scheme = "int4" if scheme == "int4_dynamic" else scheme
    found = find_scheme(scheme)
    return found.num_bits + (16 / found.group_size if found.group_size else 0)


def empty_quantized(weight: torch.Tensor, scheme: str) -> QuantizedWeight:
    """Room for a weight's integers and scales; ValueError if there is no such scheme."""
    found = find_scheme(scheme)
    out_features, in_features = weight.shape
    group_size = found.group_size or in_features
    integers = torch.empty(out_features, in_features, dtype=found.dtype, device=weight.device)
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
    group_size = quantized.group_size
    padding = num_groups * group_size - in_features
    num_rows = max(1, _CHUNK_SIZE // in_features)
    for start in range(0, out_features, num_rows):
        rows = slice(start, start + num_rows)
        groups = F.pad(weight[rows].float(), (0, padding)).reshape(-1, group_size)
        scales = _choose_scales(groups, rounding)
        integers = _round(groups, scales, rounding).view(-1, in_features + padding)
        quantized.integers[rows] = integers[:, :in_features].to(rounding.dtype)
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
    """Numbers like `groups`, still in float32; a group with scale 0 gets zeros."""
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    if scheme.dtype != torch.int8:
        return (groups * inverse).clamp_(scheme.lowest, scheme.largest)  # the cast rounds
    return (groups * inverse).round_().clamp_(scheme.lowest, scheme.largest)


def _square_error(groups: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The squared rounding error of each group: [num_groups, 1]."""
    return _round(groups, scales, scheme).mul_(scales.float()).sub_(groups).square_().sum(1, keepdim=True)
