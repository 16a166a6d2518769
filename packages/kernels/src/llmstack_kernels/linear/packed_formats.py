"""Packed formats of quantized weights for GPU kernels.

A weight is a sequence of chunks of inputs, each with all outputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.linear.configurations import CHUNK_SIZES
from llmstack_kernels.linear.quantization import QuantizedWeight
from llmstack_kernels.linear.stored_weight import StoredWeight

FP8_FACTOR = 256.0
"""The divisor of fp8 numbers where they are widened; the scales make up for it."""


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


def pack_stored_chunks(weight: StoredWeight) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """The format, weight and scales of what a checkpoint stores; None where no format has its groups.

    Scales are float32 and repeated for chunks of larger groups, so that none is rounded. Those of `int4_zeros` are
    int32 [num_chunks, 5, out_features]: the bits of four float32, and four zero points in a word. Those of `mxfp4` are
    int32 [num_chunks, out_features]: the exponents of four powers of two.
    """
    if weight.has_float_zeros:
        return None
    whole = weight.scales.shape[1] == 1
    if weight.layout == "fp8" and whole:
        words = _join_bytes(*_chunked(weight.numbers.view(torch.int8), CHUNK_SIZES["fp8"], 2))
        return "fp8", words, weight.scales.float().t().contiguous() * FP8_FACTOR
    if weight.layout in ("fp8", "int8") and weight.zeros is None and (whole or weight.group_size % 128 == 0):
        is_float = weight.layout == "fp8"
        numbers = weight.numbers if is_float else weight.numbers ^ 128
        words = _join_bytes(*_chunked(numbers.view(torch.int8), 128, 2))
        scales = _spread(weight.scales.float(), weight, 128).t().contiguous()
        return ("fp8_block", words, scales * FP8_FACTOR) if is_float else ("int8", words, scales)
    if weight.table is not None:
        return _pack_mxfp4(weight, weight.table)
    if weight.layout == "int4" and (whole or weight.group_size % 32 == 0):
        first, second, third, fourth = _chunked(weight.numbers, CHUNK_SIZES["int4_zeros"], 4)
        words = _join_bytes(first | (second << 4), third | (fourth << 4))
        scales = _in_quarters(_spread(weight.scales.float(), weight, 32)).view(torch.int32)
        zeros = _in_quarters(_spread(weight.zero_points(), weight, 32))
        zeros = zeros.transpose(1, 2).contiguous().view(torch.int32).transpose(1, 2)
        return "int4_zeros", words, torch.cat([scales, zeros], 1).contiguous()
    return None


def _pack_mxfp4(weight: StoredWeight, table: torch.Tensor) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """Numbers of e2m1 whose scales are powers of two; None for another table or other scales.

    A group of zeros has any scale: many quantizers give it the least one, which has no exponent in float32.
    """
    exponents = weight.scales.float().view(torch.int32) >> 23
    is_power = torch.ldexp(torch.ones_like(weight.scales, dtype=torch.float32), exponents - 127) == weight.scales
    has_numbers = _groups_with_numbers(weight)
    is_whole = weight.scales.shape[1] == 1 or weight.group_size % 32 == 0
    if not (is_whole and table.cpu().equal(_E2M1_VALUES) and ((is_power & (exponents > 0)) | ~has_numbers).all()):
        return None
    exponents *= has_numbers
    first, second, third, fourth = _chunked(weight.numbers, CHUNK_SIZES["mxfp4"], 4)
    words = _join_bytes(first | (second << 4), third | (fourth << 4))
    bytes_of_words = _in_quarters(_spread(exponents.to(torch.uint8), weight, 32)).transpose(1, 2).contiguous()
    return "mxfp4", words, bytes_of_words.view(torch.int32).squeeze(2)


def _groups_with_numbers(weight: StoredWeight) -> torch.Tensor:
    """Whether a group of numbers of e2m1 has any but zeros: [out_features, num_groups]."""
    size = min(weight.group_size, weight.shape[1])
    magnitudes = F.pad(weight.numbers & 7, (0, -weight.shape[1] % size))
    found: torch.Tensor = magnitudes.unflatten(1, (-1, size)).amax(2) > 0
    return found


def _spread(values: torch.Tensor, weight: StoredWeight, size: int) -> torch.Tensor:
    """Values of groups [out_features, num_groups] for runs of `size` inputs."""
    num_runs = -(-weight.shape[1] // size)
    if values.shape[1] == 1:
        return values.expand(-1, num_runs)
    return values.repeat_interleave(weight.group_size // size, 1)[:, :num_runs]


def _in_quarters(values: torch.Tensor) -> torch.Tensor:
    """[out_features, quarters of chunks] to [num_chunks, 4, out_features], zeros behind the last."""
    padded = F.pad(values, (0, -values.shape[1] % 4))
    return padded.view(padded.shape[0], -1, 4).permute(1, 2, 0).contiguous()


_E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_PACKERS = {"int8": _pack_int8, "int4": _pack_int4, "fp8": _pack_fp8}
