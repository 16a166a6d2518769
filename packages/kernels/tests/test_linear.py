"""Packed linear layers equal plain ones, and a row's result does not depend on the rows beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels.linear import (
    ACTIVATIONS,
    PackedLinear,
    cpu,
    linear,
    linear_of_packed,
    native,
    pack_linear,
    packed_weights,
    packing_version,
    reference,
)
from llmstack_kernels.native import Int, NativeLibrary
from llmstack_kernels.testing import native_variants

SHAPES = [(768, 2304), (768, 768), (2048, 96), (64, 172), (3072, 64), (17, 5), (1, 1)]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def make(in_features: int, out_features: int, dtype: torch.dtype, num_rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_rows, in_features), (out_features, in_features), (out_features,))
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype), (weight * in_features**-0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_layer_equals_a_plain_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = make(*shape, dtype, 5)
    tolerance = TOLERANCES[dtype]
    for layer_bias in (bias, None):
        expected = F.linear(x.float(), weight.float(), None if layer_bias is None else layer_bias.float())
        packed = pack_linear(weight.clone(), layer_bias)
        torch.testing.assert_close(linear(x, packed).float(), expected, atol=tolerance, rtol=tolerance)
        assert packed(x).dtype == dtype


def pack_with(backend: str, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    if backend == "cpu":
        return cpu.pack_linear(weight, bias)
    return native.NativeLinear.pack(weight, bias, NativeLibrary(backend))


needs_onednn = pytest.mark.skipif(not cpu.is_available(), reason="this build of PyTorch has no oneDNN")
BACKENDS = [pytest.param("cpu", marks=needs_onednn), *native_variants(all_named=True)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_bit_equal_in_any_batch(shape: tuple[int, int], dtype: torch.dtype, backend: str) -> None:
    if (backend, dtype) == ("cpu", torch.bfloat16) and torch.cpu._is_amx_tile_supported():
        pytest.skip("oneDNN has other orders of sums for few rows where the processor has AMX")
    x, weight, bias = make(*shape, dtype, 65)
    packed = pack_with(backend, weight, bias)
    whole = packed(x)
    for start, end in ((0, 1), (64, 65), (3, 5), (5, 8), (60, 64), (1, 6), (11, 18), (10, 18), (7, 40), (1, 65)):
        assert torch.equal(packed(x[start:end]), whole[start:end])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_backend_takes_bias_activation_and_residual_along(
    activation: str, dtype: torch.dtype, backend: str
) -> None:
    for num_rows, shape in ((1, (64, 172)), (13, (40, 65)), (200, (33, 70))):
        x, weight, bias = make(*shape, dtype, num_rows)
        residual = torch.randn(num_rows, shape[1]).to(dtype)
        plain = reference.PlainLinear(weight.float(), bias.float())
        packed = pack_with(backend, weight, bias)
        out = linear(x, packed, activation, residual)
        expected = plain(x.float(), activation, residual.float())
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_outputs_can_be_float32(dtype: torch.dtype, backend: str) -> None:
    x, weight, bias = make(64, 100, dtype, 3)
    out = pack_with(backend, weight, bias)(x, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(
        out, F.linear(x.float(), weight.float(), bias.float()), atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize("backend", native_variants(all_named=True))
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_what_is_not_a_number_stays_so_and_disturbs_no_other_row(dtype: torch.dtype, backend: str) -> None:
    x, weight, bias = make(64, 100, dtype, 3)
    expected = pack_with(backend, weight, bias)(x)
    x[1, 7] = float("nan")
    for activation in ACTIVATIONS:
        out = pack_with(backend, weight, bias)(x, activation)
        assert out[1].isnan().all()
        assert not out[[0, 2]].isnan().any()
    out = pack_with(backend, weight, bias)(x)
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("backend", native_variants(all_named=True))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_whose_inputs_are_widened_in_parts_are_bit_equal_alone(dtype: torch.dtype, backend: str) -> None:
    wide, weight, bias = make(1500, 70, dtype, 200)
    x = torch.cat((wide, wide), dim=1)[:, 1500:]  # strided: each part begins at a row of its own
    for out_dtype in (dtype, torch.float32):
        residual = torch.randn(200, 70).to(out_dtype)
        packed = pack_with(backend, weight, bias)
        whole = packed(x, "gelu", residual, out_dtype)
        for row in (0, 24, 95, 96, 192, 199):
            alone = packed(wide[row : row + 1], "gelu", residual[row : row + 1], out_dtype)
            assert torch.equal(whole[row : row + 1], alone)


@pytest.mark.parametrize("backend", native_variants(all_named=True))
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_weights_that_bypass_the_caches_give_the_same_bits(dtype: torch.dtype, backend: str) -> None:
    x, weight, bias = make(768, 2304, dtype, 1)
    packed, switch = pack_with(backend, weight, bias), NativeLibrary(backend).function("stream_weights", Int)
    through_caches = packed(x)
    switch(1)
    try:
        assert torch.equal(packed(x), through_caches)
    finally:
        switch(0)


def test_leading_dimensions_and_empty_batches_pass_through() -> None:
    x, weight, bias = make(16, 8, torch.float32, 6)
    packed = pack_linear(weight, bias)
    torch.testing.assert_close(packed(x.view(2, 3, 16)), F.linear(x, weight, bias).view(2, 3, 8))
    assert packed(x[:0]).shape == (0, 8)


def test_rows_that_are_not_contiguous_are_read_right() -> None:
    x, weight, bias = make(16, 8, torch.float32, 6)
    wide = torch.cat((x, x), dim=1)
    torch.testing.assert_close(pack_linear(weight, bias)(wide[:, 16:]), F.linear(x, weight, bias))


def test_a_packed_layer_survives_changes_to_the_weight_it_was_made_of() -> None:
    x, weight, _ = make(16, 8, torch.float32, 4)
    expected = F.linear(x, weight)
    packed = pack_linear(weight)
    if not isinstance(packed, reference.PlainLinear):
        weight.zero_()
    torch.testing.assert_close(packed(x), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        pack_linear(torch.zeros(3))
    with pytest.raises(ValueError, match="bias"):
        pack_linear(torch.zeros(3, 2), torch.zeros(2))
    packed = pack_linear(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="inputs"):
        linear(torch.zeros(1, 3), packed)
    with pytest.raises(ValueError, match="activation"):
        linear(torch.zeros(1, 2), packed, "swish")
    with pytest.raises(ValueError, match="residual"):
        linear(torch.zeros(1, 2), packed, residual=torch.zeros(1, 2))


@pytest.mark.parametrize("scheme", [None, "int8", "int4", "int8_dynamic"])
@pytest.mark.skipif(not packing_version("cpu"), reason="only native kernels have packed weights")
def test_a_layer_of_a_packed_weight_computes_the_same_bits(scheme: str | None) -> None:
    x, weight, bias = make(192, 100, torch.bfloat16, 5)
    first = pack_linear(weight, bias, scheme)
    kept = packed_weights(first)
    assert kept is not None
    assert [(one.shape, one.dtype) for one in kept] == [((100, 192), torch.bfloat16)]
    assert torch.equal(linear_of_packed(kept, bias)(x), first(x))
    assert packed_weights(reference.PlainLinear(weight, bias)) is None
