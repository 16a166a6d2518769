"""Linear layers of a GPU: right for any shape, format and number of rows, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.linear import ACTIVATIONS, GATED_ACTIVATIONS, QUANTIZATIONS, linear, quantize
from llmstack_kernels.linear import triton as kernels
from llmstack_kernels.linear.configurations import CHUNK_SIZES, Configuration
from llmstack_kernels.linear.quantization import QuantizedWeight
from llmstack_kernels.linear.reference import PlainLinear

# What Triton's own interpreter does to the bounds of a loop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(64, 64), (100, 70), (17, 130)]


def make(
    in_features: int, out_features: int, num_rows: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, in_features), (out_features, in_features), (out_features,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    weight *= in_features**-0.5
    return x.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, split_k: int, scheme: str | None = None
) -> kernels.TritonLinear:
    shape = (weight.shape[0], weight.shape[1])
    block_k = CHUNK_SIZES[scheme] if scheme else 32
    cut = Configuration(block_k, min(split_k, -(-shape[1] // block_k)))
    if scheme is None:
        return kernels.TritonLinear(shape, weight.dtype, bias, weight, None, "plain", None, cut)
    packed, scales = kernels.pack_chunks(quantize(weight, scheme))
    return kernels.TritonLinear(shape, weight.dtype, bias, packed, scales, scheme, None, cut)


def exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str, residual: torch.Tensor | None
) -> torch.Tensor:
    return PlainLinear(weight.double(), bias.double())(
        x.double(), activation, None if residual is None else residual.double()
    )


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_agrees_with_float64(
    shape: tuple[int, int], num_rows: int, split_k: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, weight, bias = make(*shape, num_rows, triton_dtype, triton_device)
    out = linear(x, pack(weight, bias, split_k))
    assert out.dtype == triton_dtype
    tolerance = TOLERANCE[triton_dtype]
    torch.testing.assert_close(out.double(), exact(x, weight, bias, "none", None), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED_ACTIVATIONS])
def test_activation_gate_and_residual_are_taken_along(
    activation: str, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, weight, bias = make(70, 136, 5, triton_dtype, triton_device)
    width = 68 if activation in GATED_ACTIVATIONS else 136
    residual = torch.randn(5, width, device=triton_device).to(triton_dtype)
    tolerance = TOLERANCE[triton_dtype]
    for split_k in (1, 2):
        out = linear(x, pack(weight, bias, split_k), activation, residual)
        expected = exact(x, weight, bias, activation, residual)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_outputs_can_be_float32_and_leading_dimensions_pass_through(triton_device: str) -> None:
    x, weight, bias = make(64, 40, 6, torch.float16, triton_device)
    packed = pack(weight, bias, 1)
    out = packed(x.view(2, 3, 64), out_dtype=torch.float32)
    assert (out.dtype, out.shape) == (torch.float32, (2, 3, 40))
    torch.testing.assert_close(out.view(6, 40).double(), exact(x, weight, bias, "none", None), atol=1e-5, rtol=1e-5)
    assert packed(x[:0]).shape == (0, 40)


def test_rows_may_lie_apart_and_what_is_not_a_number_stays_in_its_row(triton_device: str) -> None:
    x, weight, bias = make(70, 40, 6, torch.float32, triton_device)
    wide = torch.full((6, 100), float("nan"), device=triton_device)
    wide[:, 10:80] = x
    packed = pack(weight, bias, 2)
    assert torch.equal(packed(wide[:, 10:80]), packed(x))
    x[2, 69] = float("nan")
    assert packed(x).isnan().any(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
@pytest.mark.parametrize("shape", [(128, 64), (200, 70)], ids=str)
def test_small_numbers_are_computed_with_as_they_stand(
    shape: tuple[int, int], scheme: str, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, weight, bias = make(*shape, 5, triton_dtype, triton_device)
    rounded = quantize(weight, scheme).dequantize(torch.float64)
    tolerance = TOLERANCE[triton_dtype]
    for split_k in (1, 2):
        out = pack(weight, bias, split_k, scheme)(x, "relu")
        torch.testing.assert_close(out.double(), exact(x, rounded, bias, "relu", None), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_every_code_is_widened_exactly(scheme: str, triton_dtype: torch.dtype, triton_device: str) -> None:
    in_features = 256 + 32
    if scheme == "int4":
        integers = (torch.arange(in_features) % 16 - 8).to(torch.int8).repeat(3, 1)
    else:
        integers = torch.arange(-128, -128 + in_features).to(torch.int8).repeat(3, 1)
    group_size = {"int4": 32, "int8": 128, "fp8": in_features}[scheme]
    numbers = integers.view(torch.float8_e4m3fn) if scheme == "fp8" else integers
    scales = (1.375 ** -torch.arange(3 * -(-in_features // group_size))).view(3, -1).bfloat16()
    quantized = QuantizedWeight(scheme, numbers.to(triton_device), scales.to(triton_device), group_size)
    packed, packed_scales = kernels.pack_chunks(quantized)
    shape = (3, in_features)
    found = kernels.TritonLinear(shape, triton_dtype, None, packed, packed_scales, scheme, None).widen()
    expected = quantized.dequantize(triton_dtype)
    is_number = expected.isfinite()  # fp8's code for what is none is never a weight
    assert torch.equal(found[is_number], expected[is_number])
    assert is_number.all() or scheme == "fp8"


@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS])
def test_a_row_is_bit_equal_in_any_batch(scheme: str | None, triton_dtype: torch.dtype, triton_device: str) -> None:
    x, weight, bias = make(136, 66, 66, triton_dtype, triton_device)
    assert parts_that_differ(pack(weight, bias, 2, scheme), x) == []


def parts_that_differ(packed: Callable[[torch.Tensor, str], torch.Tensor], x: torch.Tensor) -> list[tuple[int, int]]:
    """Ranges of the 66 rows that have other bits alone than among all rows."""
    whole = packed(x, "silu")
    parts = [(0, 1), (65, 66), (7, 40)]
    return [(start, end) for start, end in parts if not torch.equal(packed(x[start:end], "silu"), whole[start:end])]


@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS])
def test_a_split_that_depends_on_the_number_of_rows_is_found(scheme: str | None, triton_device: str) -> None:
    x, weight, bias = make(520, 66, 66, torch.float32, triton_device)
    one, other = (pack(weight, bias, split_k, scheme) for split_k in (2, 3))
    assert parts_that_differ(lambda rows, *args: (one if len(rows) < 40 else other)(rows, *args), x) != []


def test_a_block_of_inputs_that_depends_on_the_number_of_rows_is_found(triton_device: str) -> None:
    x, weight, bias = make(136, 66, 66, torch.float32, triton_device)
    one, other = (
        kernels.TritonLinear((66, 136), weight.dtype, bias, weight, None, "plain", None, Configuration(block_k, 1))
        for block_k in (32, 64)
    )
    assert parts_that_differ(lambda rows, *args: (one if len(rows) < 40 else other)(rows, *args), x) != []


def test_parts_are_summed_alike_by_programs_of_their_own_and_by_one(
    triton_dtype: torch.dtype, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = make(160, 70, 5, triton_dtype, triton_device)
    packed = pack(weight, bias, 3)
    apart = packed(x)
    monkeypatch.setattr(kernels, "MAX_SPLIT_ROWS", 4)
    assert torch.equal(packed(x), apart)


def test_unwritten_scratch_is_never_read_and_tickets_are_given_back(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = make(160, 70, 5, torch.float32, triton_device)
    packed = pack(weight, bias, 2)
    expected = packed(x)
    make_empty = torch.empty

    def poisoned(*sizes: object, **options: object) -> torch.Tensor:
        out: torch.Tensor = make_empty(*sizes, **options)  # type: ignore[call-overload]  # passed on as it came
        return out.fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)
    assert all(torch.equal(packed(x), expected) for _ in range(2))
    assert packed._tickets is not None
    assert not packed._tickets.any()


@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS])
def test_many_rows_are_pytorchs_unless_they_must_not_depend_on_their_number(
    scheme: str | None, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = make(70, 40, 9, torch.float16, triton_device)
    monkeypatch.setattr(kernels, "_MAX_STREAMED_ROWS", 8)
    monkeypatch.setattr(kernels, "_MAX_QUANTIZED_ROWS", 8)
    calls = []
    product = F.linear

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(arguments[0].shape[0])
        return product(*arguments)

    monkeypatch.setattr(F, "linear", counted)
    for is_batch_invariant, expected in ((False, [9]), (True, [])):
        if scheme is None:
            packed = kernels.pack_linear(weight, bias, is_batch_invariant)
        else:
            packed = kernels.pack_quantized_linear(quantize(weight, scheme), torch.float16, bias, is_batch_invariant)
        calls.clear()
        many, few = packed(x), packed(x[:8])
        assert calls == expected
        torch.testing.assert_close(many[:8], few, atol=4e-3, rtol=4e-3)


def test_float32_is_pytorchs_unless_it_must_not_depend_on_the_number_of_rows(triton_device: str) -> None:
    x, weight, bias = make(70, 40, 3, torch.float32, triton_device)
    assert isinstance(kernels.pack_linear(weight, bias), PlainLinear)
    packed = kernels.pack_quantized_linear(quantize(weight, "int8"), torch.float32, bias, True)
    assert isinstance(packed, kernels.TritonLinear)
    rounded = quantize(weight, "int8").dequantize(torch.float64)
    torch.testing.assert_close(packed(x).double(), exact(x, rounded, bias, "none", None), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [64, 65])
def test_on_a_card_float32_outputs_were_never_rounded_to_16_bits(num_rows: int, triton_device: str) -> None:
    x, weight, bias = make(768, 1000, num_rows, torch.bfloat16, triton_device)
    out = kernels.pack_linear(weight, bias)(x, out_dtype=torch.float32)
    torch.testing.assert_close(out.double(), exact(x, weight, bias, "none", None), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, *QUANTIZATIONS])
@pytest.mark.parametrize("shape", [(768, 2304), (4096, 4096), (14336, 4096), (4096, 28672)], ids=str)
def test_on_a_card_rows_are_bit_equal_whatever_their_number(
    shape: tuple[int, int], scheme: str | None, triton_device: str
) -> None:
    x, weight, bias = make(*shape, 1100, torch.bfloat16, triton_device)
    if scheme is None:
        packed = kernels.pack_linear(weight, bias, is_batch_invariant=True)
    else:
        packed = kernels.pack_quantized_linear(quantize(weight, scheme), torch.bfloat16, bias, True)
    assert isinstance(packed, kernels.TritonLinear)
    assert kernels.check_rows_independent(packed, x) == []
    rounded = packed.widen().float()
    torch.testing.assert_close(packed(x).float(), F.linear(x.float(), rounded, bias.float()), atol=3e-2, rtol=3e-2)
