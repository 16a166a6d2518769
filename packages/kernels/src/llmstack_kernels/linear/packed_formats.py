"""Quantized weights as the kernels of a GPU read them: in chunks of inputs, each with all outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.configurations import CHUNK_SIZES
from llmstack_kernels.linear.quantization import QuantizedWeight

FP8_FACTOR = 256.0
"""What numbers of fp8 are divided by where they are widened; the scales make up for it."""


def pack_chunks(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight, int8 [num_chunks, out_features, bytes], zeros behind the last input; and its scales.

    Scales are float32 [num_chunks, out_features] for `int8`; int32, two of bfloat16 in each, for `int4`; float32
    [1, out_features] for `fp8`.
    """
    return _PACKERS[quantized.scheme](quantized)


def _pack_int8(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    return _chunked(quantized.integers, CHUNK_SIZES["int8"]), quantized.scales.float().t().contiguous()


def _pack_fp8(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    weight = _chunked(quantized.integers.view(torch.int8), CHUNK_SIZES["fp8"])
    return weight, quantized.scales.float().t().contiguous() * FP8_FACTOR


def _pack_int4(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _chunked(quantized.integers, CHUNK_SIZES["int4"]).chunk(2, dim=2)
    scales = F.pad(quantized.scales, (0, quantized.scales.shape[1] % 2)).contiguous()
    return (low & 15) | (high << 4), scales.view(torch.int32).t().contiguous()


def _chunked(integers: torch.Tensor, chunk_size: int) -> torch.Tensor:
    out_features, in_features = integers.shape
    padded = F.pad(integers, (0, -in_features % chunk_size))
    return padded.view(out_features, -1, chunk_size).transpose(0, 1).contiguous()


_PACKERS = {"int8": _pack_int8, "int4": _pack_int4, "fp8": _pack_fp8}
