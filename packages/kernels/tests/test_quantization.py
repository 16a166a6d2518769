"""Quantized layers compute with exactly the integers and scales they say, and lose as little as their bits allow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels.linear import QUANTIZATIONS, bits_per_weight, computes_quantized, linear, pack_linear, quantize
from llmstack_kernels.linear import quantization as by_pytorch
from llmstack_kernels.linear.native import NativeLinear, quantize_by
from llmstack_kernels.linear.native_stored import pack_stored
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.testing import native_variants

SCHEMES = ("int8", "int4", "fp8")
SHAPES = [(64, 128), (200, 70), (33, 65), (1, 1)]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def make(in_features: int, out_features: int, dtype: torch.dtype, num_rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, in_features), (out_features, in_features), (out_features,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype), (weight * in_features**-0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_layer_computes_with_the_weight_its_integers_stand_for(
    shape: tuple[int, int], dtype: torch.dtype, scheme: str, variant: str
) -> None:
    for num_rows in (1, 5, 20):
        x, weight, bias = make(*shape, dtype, num_rows)
        quantized = quantize(weight, scheme)
        packed = pack_stored(quantized.stored(), dtype, bias, NativeLibrary(variant))
        expected = F.gelu(F.linear(x.float(), quantized.dequantize(torch.float32), bias.float()))
        found = linear(x, packed, "gelu")
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        wide = packed(x, out_dtype=torch.float32)
        torch.testing.assert_close(
            wide, F.linear(x.float(), quantized.dequantize(torch.float32), bias.float()), atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_are_bit_equal_in_any_batch(dtype: torch.dtype, scheme: str, variant: str) -> None:
    x, weight, bias = make(200, 130, dtype, 65)
    packed = pack_stored(quantize(weight, scheme).stored(), dtype, bias, NativeLibrary(variant))
    whole = packed(x)
    for start, end in ((0, 1), (64, 65), (3, 5), (7, 40), (1, 65)):
        assert torch.equal(packed(x[start:end]), whole[start:end])


@pytest.mark.parametrize(("scheme", "largest_error"), [("int8", 0.01), ("int4", 0.1), ("fp8", 0.03)])
def test_the_relative_error_is_what_the_bits_allow(scheme: str, largest_error: float) -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    error = quantize(weight, scheme).dequantize(torch.float32) - weight
    assert error.norm() / weight.norm() < largest_error


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (768, 300)], ids=str)
def test_native_code_rounds_as_pytorch_does(
    shape: tuple[int, int], dtype: torch.dtype, scheme: str, variant: str
) -> None:
    _, weight, _ = make(*shape, dtype, 1)
    found, expected = quantize_by(NativeLibrary(variant), weight, scheme), by_pytorch.quantize(weight, scheme)
    is_same = found.scales == expected.scales
    inputs_are_same = is_same.repeat_interleave(found.group_size, 1)[:, : shape[0]]
    assert torch.equal(found.integers[inputs_are_same], expected.integers[inputs_are_same])
    # Between two scales of equal error, the order of a sum decides.
    assert is_same.float().mean() > 0.999
    wide = weight.float()
    errors = [(quantized.dequantize(torch.float32) - wide).norm().item() for quantized in (found, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_a_weight_is_rounded_alike_in_one_chunk_or_many_and_whatever_its_strides(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, weight, _ = make(200, 70, torch.float32, 1)
    expected = by_pytorch.quantize(weight, scheme)
    monkeypatch.setattr(by_pytorch, "_CHUNK_SIZE", 1000)
    for found in (by_pytorch.quantize(weight, scheme), quantize(weight.t().contiguous().t(), scheme)):
        assert torch.equal(found.integers, expected.integers)
        assert torch.equal(found.scales, expected.scales)


def test_a_weight_takes_its_bits_and_a_part_of_a_scale() -> None:
    for scheme in ("int8", "int4"):
        quantized = quantize(torch.randn(64, 256), scheme)
        num_bits = quantized.integers.numel() * int(scheme[-1]) + quantized.scales.numel() * 16
        assert bits_per_weight(scheme) == num_bits / (64 * 256)
    assert bits_per_weight("fp8") == 8  # and 16 per output


def test_only_types_with_a_kernel_are_said_to_be_computed_from_integers() -> None:
    assert not computes_quantized(torch.float64, "cpu")
    for scheme in SCHEMES:
        packed = pack_linear(torch.randn(8, 8), None, scheme)
        assert computes_quantized(torch.float32, "cpu", scheme) == isinstance(packed, NativeLinear)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_zeros_stay_zeros_and_a_single_weight_nearly_itself(scheme: str) -> None:
    weight = torch.zeros(3, 256)
    weight[1, 5] = 2.0
    found = quantize(weight, scheme).dequantize(torch.float32)
    torch.testing.assert_close(found, weight, rtol=0.01, atol=0.0)


def test_every_backend_takes_quantized_weights() -> None:
    x, weight, bias = make(64, 32, torch.float16, 3)
    for scheme in QUANTIZATIONS:
        packed = pack_linear(weight, bias, scheme)
        expected = F.linear(x.float(), quantize(weight, scheme).dequantize(torch.float32), bias.float())
        torch.testing.assert_close(packed(x).float(), expected, atol=2e-2, rtol=2e-2)


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="int8, int4 or fp8"):
        pack_linear(torch.zeros(2, 2), None, "int3")
    with pytest.raises(ValueError, match="int8, int4 or fp8"):
        bits_per_weight("int3")
