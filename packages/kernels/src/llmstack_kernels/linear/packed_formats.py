"""Packed formats of quantized weights for GPU kernels.

A weight is a sequence of chunks of inputs, each with all outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.configurations import CHUNK_SIZES
from llmstack_kernels.linear.quantization import QuantizedWeight

FP8_FACTOR = 256.0
"""What numbers of fp8 are divided by where they are widened; the scales make up for it."""


def pack_chunks(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight, int16 [num_chunks, out_features, words], zeros behind the last input; and its scales.

    A word holds numbers of the chunk's halves (`int8`, `fp8`) or quarters (`int4`), the first in the lowest bits.
    Scales are float32 [num_chunks, out_features] for `int8`; int32 [num_chunks, 2, out_features], two of bfloat16 in
    each, for `int4`; float32 [1, out_features] for `fp8`.
    """
    return _PACKERS[quantized.scheme](quantized)


def _pack_int8(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    words = _join_bytes(*_chunked(quantized.integers, CHUNK_SIZES["int8"], 2))
    return words, quantized.scales.float().t().contiguous()


def _pack_fp8(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    words = _join_bytes(*_chunked(quantized.integers.view(torch.int8), CHUNK_SIZES["fp8"], 2))
    return words, quantized.scales.float().t().contiguous() * FP8_FACTOR


def _pack_int4(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    first, second, third, fourth = _chunked(quantized.integers, CHUNK_SIZES["int4"], 4)
    words = _join_bytes((first & 15) | (second << 4), (third & 15) | (fourth << 4))
    scales = F.pad(quantized.scales, (0, -quantized.scales.shape[1] % 4)).view(torch.int32)
    return words, scales.view(scales.shape[0], -1, 2).permute(1, 2, 0).contiguous()


def _chunked(integers: torch.Tensor, chunk_size: int, num_parts: int) -> tuple[torch.Tensor, ...]:
    """Parts of each chunk: [num_chunks, out_features, chunk_size / num_parts]."""
    out_features, in_features = integers.shape
    padded = F.pad(integers, (0, -in_features % chunk_size))
    return padded.view(out_features, -1, chunk_size).transpose(0, 1).chunk(num_parts, dim=2)


def _join_bytes(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.stack((low, high), dim=-1).view(torch.int16).squeeze(-1)


_PACKERS = {"int8": _pack_int8, "int4": _pack_int4, "fp8": _pack_fp8}
