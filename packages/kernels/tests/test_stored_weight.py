"""Weights of quantized checkpoints are computed from their numbers, exactly as they stand for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels.linear import (
    STORED_LAYOUTS,
    StoredWeight,
    computes_stored,
    concatenate_linears,
    join_stored,
    linear,
    linear_of_packed,
    pack_linear,
    pack_stored_linear,
    packed_weights,
    packing_version,
)
from llmstack_kernels.linear.native_stored import pack_stored
from llmstack_kernels.linear.reference import PlainLinear
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.native.capture import capture
from llmstack_kernels.testing import native_variants, runs_native_kernels

# Outputs, inputs, inputs per group: whole and short panels and groups, an odd number of inputs.
SHAPES = [(70, 64, 32), (130, 257, 257), (7, 160, 128)]


def make(layout: str, shape: tuple[int, int, int], **parts: Any) -> StoredWeight:
    out_features, in_features, group_size = shape
    generator = torch.Generator().manual_seed(0)
    size = 16 if layout in ("int4", "table4") else 256
    numbers = torch.randint(0, size, (out_features, in_features), generator=generator).to(torch.uint8)
    if layout == "fp8":
        numbers = torch.where((numbers & 127) == 127, 0, numbers)  # which are NaN
    groups = (out_features, -(-in_features // group_size))
    scales = (torch.rand(groups, generator=generator) + 0.5).to(parts.pop("scale_dtype", torch.float16))
    if parts.pop("has_float_zeros", False):
        parts["zeros"] = torch.randn(groups, generator=generator) * size
    if parts.pop("has_zeros", False):
        parts["zeros"] = torch.randint(0, size, groups, generator=generator).to(torch.uint8)
    if parts.pop("has_order", False):
        parts["order"] = torch.randperm(in_features, generator=generator)
    table = torch.randn(16, generator=generator) if layout == "table4" else None
    return StoredWeight(layout, numbers, scales, group_size, table=table, **parts)


def meant(weight: StoredWeight) -> torch.Tensor:
    """What the numbers stand for, in float64 and one by one."""
    columns = weight.order if weight.order is not None else torch.arange(weight.shape[1])
    groups = torch.arange(weight.shape[1]) // weight.group_size
    if weight.layout == "fp8":
        values = weight.numbers.view(torch.float8_e4m3fn).double()
    elif weight.table is not None:
        values = weight.table.double()[weight.numbers.int()]
    else:
        values = weight.numbers.double() - weight.zero_points().double()[:, groups]
    result = torch.empty(weight.shape, dtype=torch.float64)
    result[:, columns] = values * weight.scales.double()[:, groups]
    return result


PARTS: list[dict[str, Any]] = [
    {},
    {"scale_dtype": torch.float32, "has_zeros": True, "has_order": True},
    {"scale_dtype": torch.bfloat16, "has_zeros": True},
]


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("layout", STORED_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_layer_computes_what_its_numbers_stand_for_and_rows_are_bit_equal_in_any_batch(
    dtype: torch.dtype, layout: str, variant: str
) -> None:
    for shape, parts in zip(SHAPES, PARTS, strict=True):
        own = {name: value for name, value in parts.items() if name != "has_zeros" or layout.startswith("int")}
        weight = make(layout, shape, **own)
        bias = torch.randn(shape[0]).to(dtype)
        packed = pack_stored(weight, dtype, bias, NativeLibrary(variant))
        x = torch.randn(30, shape[1]).to(dtype)
        expected = F.linear(x.double(), meant(weight), bias.double())
        found = packed(x, out_dtype=torch.float32)
        assert (found - expected).abs().max() <= 4e-6 * expected.abs().max()
        for start, end in ((0, 1), (1, 3), (2, 5), (0, 4), (3, 8), (5, 11), (0, 29)):
            assert torch.equal(packed(x[start:end], out_dtype=torch.float32), found[start:end])
        residual = torch.randn(30, shape[0]).to(dtype)
        finished = linear(x, packed, "silu", residual)
        assert finished.dtype == dtype
        torch.testing.assert_close(
            finished.double(), F.silu(expected) + residual.double(), rtol=1e-2, atol=1e-3 * float(expected.abs().max())
        )


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("layout", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_zero_points_may_be_no_integers(dtype: torch.dtype, layout: str, variant: str) -> None:
    for shape in SHAPES:
        weight = make(layout, shape, scale_dtype=torch.float32, has_float_zeros=True)
        packed = pack_stored(weight, dtype, None, NativeLibrary(variant))
        x = torch.randn(30, shape[1]).to(dtype)
        expected = F.linear(x.double(), meant(weight))
        found = packed(x, out_dtype=torch.float32)
        assert (found - expected).abs().max() <= 4e-6 * expected.abs().max()
        for start, end in ((0, 1), (1, 3), (2, 5), (0, 4), (3, 8), (5, 11), (0, 29)):
            assert torch.equal(packed(x[start:end], out_dtype=torch.float32), found[start:end])


def test_zero_points_of_both_kinds_are_joined_without_rounding() -> None:
    parts = [make("int4", SHAPES[0], has_float_zeros=True), make("int4", SHAPES[0], has_zeros=True)]
    joined = join_stored(parts)
    assert joined is not None
    assert joined.has_float_zeros
    assert torch.equal(meant(joined), torch.cat([meant(part) for part in parts]))


@pytest.mark.parametrize("layout", STORED_LAYOUTS)
def test_widening_means_the_same(layout: str) -> None:
    weight = make(layout, SHAPES[0], has_order=True)
    torch.testing.assert_close(weight.dequantize(torch.float32).double(), meant(weight), rtol=1e-7, atol=0.0)
    packed = pack_stored_linear(weight, torch.float64)
    x = torch.randn(2, weight.shape[1], dtype=torch.float64)
    torch.testing.assert_close(packed(x), F.linear(x, weight.dequantize(torch.float64)))


@pytest.mark.parametrize("layout", STORED_LAYOUTS)
def test_a_large_weight_is_widened_in_parts_that_make_the_whole(layout: str) -> None:
    weight = make(layout, (600, 300, 64))  # more numbers than are widened together
    torch.testing.assert_close(weight.dequantize(torch.float32).double(), meant(weight), rtol=1e-7, atol=0.0)
    assert torch.equal(weight.dequantize(torch.bfloat16), weight.dequantize(torch.float32).bfloat16())


def test_the_reference_widens_and_says_so() -> None:
    if runs_native_kernels():
        assert all(computes_stored(torch.float16, "cpu", layout) for layout in STORED_LAYOUTS)
    assert not computes_stored(torch.float64, "cpu", "int4")


def test_packed_weights_take_the_bits_that_they_have() -> None:
    for layout, bits in (("int4", 4), ("table4", 4), ("int8", 8), ("fp8", 8)):
        weight = make(layout, (64, 256, 128))
        zeros = 2 * 64 if layout.startswith("int") else 0
        assert weight.num_bytes() == 64 * 256 * bits // 8 + 2 * 2 * 64 + zeros


def test_parts_of_one_kind_are_joined_and_rows_are_selected() -> None:
    first, second = make("int4", SHAPES[0]), make("int4", SHAPES[0], has_zeros=True)
    joined = join_stored([first, second])
    assert joined is not None
    assert torch.equal(joined.dequantize(torch.float32)[70:], second.dequantize(torch.float32))
    assert torch.equal(joined.dequantize(torch.float32)[:70], first.dequantize(torch.float32))
    chosen = joined.rows(torch.tensor([100, 3]))
    assert torch.equal(chosen.dequantize(torch.float32), joined.dequantize(torch.float32)[[100, 3]])


@pytest.mark.parametrize("parts", [{"has_order": True}, {"scale_dtype": torch.float32}])
def test_parts_of_several_kinds_are_computed_apart(parts: dict[str, Any]) -> None:
    weights = [make("int4", SHAPES[0]), make("int4", SHAPES[0], **parts)]
    assert join_stored(weights) is None
    plain = torch.randn(8, 64)
    layers = [pack_stored_linear(weight, torch.float32) for weight in weights] + [pack_linear(plain)]
    x, residual = torch.randn(3, 64), torch.randn(3, 148)
    found = linear(x, concatenate_linears(layers), "relu", residual)
    whole = torch.cat([*(weight.dequantize(torch.float32) for weight in weights), plain])
    torch.testing.assert_close(found, F.linear(x, whole).relu() + residual, rtol=1e-5, atol=1e-4)


def test_a_layer_with_an_order_of_inputs_can_be_captured() -> None:
    if not runs_native_kernels():
        pytest.skip("the native kernels are not built")
    packed = pack_stored_linear(make("int4", SHAPES[0], has_order=True), torch.bfloat16)
    x, other = torch.randn(2, 2, 64).bfloat16()
    expected = packed(other)
    with capture() as captured:
        out = packed(x)
    x.copy_(other)
    captured.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"layout": "int3"}, "layout 'int3' is unknown"),
        ({"numbers": torch.zeros(2, 64)}, "numbers must be uint8"),
        ({"numbers": torch.full((2, 64), 16, dtype=torch.uint8)}, "does not fit into four bits"),
        ({"scales": torch.full((2, 2), float("nan"))}, "a scale is NaN or infinite"),
        ({"scales": torch.ones(2, 3)}, "scales of shape"),
        ({"zeros": torch.zeros(2, 3, dtype=torch.uint8)}, "zero points of shape"),
        ({"zeros": torch.full((2, 2), float("inf"))}, "a zero point is NaN or infinite"),
        ({"group_size": 0}, "groups of 0 inputs"),
        ({"group_size": 33}, "groups of 33 inputs"),
        ({"table": torch.zeros(16)}, "only and always"),
        ({"layout": "table4"}, "only and always"),
        ({"layout": "table4", "table": torch.zeros(15)}, "16 finite numbers"),
        ({"order": torch.zeros(64, dtype=torch.int64)}, "no permutation"),
        ({"layout": "fp8", "numbers": torch.full((2, 64), 255, dtype=torch.uint8)}, "a weight is NaN"),
        ({"layout": "fp8", "scales": torch.full((2, 2), 1e38)}, "a scale is too large"),
    ],
)
def test_what_kernels_could_not_compute_is_refused(parts: dict[str, Any], message: str) -> None:
    given = {"layout": "int4", "numbers": torch.zeros(2, 64, dtype=torch.uint8), "scales": torch.ones(2, 2),
             "group_size": 32} | parts  # fmt: skip
    with pytest.raises(ValueError, match=message):
        StoredWeight(**given)


@pytest.mark.parametrize("layout", STORED_LAYOUTS)
@pytest.mark.parametrize(("inputs", "group_size"), [(range(64), 32), (range(80, 160), 32), (range(80, 160), 256)])
def test_a_run_of_inputs_keeps_its_values_in_smaller_groups_where_it_begins_inside_one(
    layout: str, inputs: range, group_size: int
) -> None:
    weight = make(layout, (10, 160, group_size), has_zeros=layout.startswith("int"))
    columns = weight.columns(inputs)
    assert columns is not None
    expected = weight.dequantize(torch.float32)[:, inputs.start : inputs.stop]
    assert torch.equal(columns.dequantize(torch.float32), expected)


def test_inputs_that_no_group_size_fits_are_not_cut() -> None:
    assert make("int8", (10, 160, 32)).columns(range(81, 160)) is None
    assert make("int8", (10, 160, 32), has_order=True).columns(range(64)) is None


@pytest.mark.skipif(not packing_version("cpu"), reason="only native kernels have packed weights")
def test_layers_of_kept_weights_compute_the_same_bits_part_by_part() -> None:
    """All layouts, the kinds of their scales and zero points, a permutation, and parts that are stored differently."""
    shape = (70, 64, 32)
    stored = [make(layout, shape, scale_dtype=torch.float32) for layout in STORED_LAYOUTS]
    stored += [make("int8", shape, has_zeros=True), make("int4", shape, has_float_zeros=True)]
    stored.append(make("int4", shape, has_order=True))
    first = concatenate_linears(
        [*(pack_stored_linear(one, torch.bfloat16) for one in stored), pack_linear(torch.randn(6, 64).bfloat16())]
    )
    x = torch.randn(3, 64).bfloat16()
    kept = packed_weights(first)
    assert kept is not None
    assert len(kept) == len(stored) + 1
    again = linear_of_packed(kept, torch.ones(first.out_features).bfloat16())
    bias = torch.ones(first.out_features).bfloat16()
    parts = [*(pack_stored_linear(one, torch.bfloat16, bias[:70]) for one in stored)]
    assert torch.equal(again(x)[:, : 70 * len(stored)], torch.cat([part(x) for part in parts], -1))
    assert torch.equal(linear_of_packed(kept, None)(x), first(x))
    damaged = replace(kept[-2], order=torch.full((64,), 9, dtype=torch.int32))
    with pytest.raises(ValueError, match="the order of inputs is no permutation"):
        linear_of_packed([damaged], None)
    assert packed_weights(concatenate_linears([first, PlainLinear(torch.zeros(1, 64), None)])) is None


def test_parts_that_are_stored_differently_can_be_captured() -> None:
    if not runs_native_kernels():
        pytest.skip("the native kernels are not built")
    parts = [make("int4", SHAPES[0]), make("int8", SHAPES[0])]
    layer = concatenate_linears([pack_stored_linear(part, torch.bfloat16) for part in parts])
    x, other = torch.randn(2, 3, 64).bfloat16()
    expected = layer(other)
    assert torch.equal(expected[:, 70:], pack_stored_linear(parts[1], torch.bfloat16)(other))
    with capture() as captured:
        out = layer(x)
    x.copy_(other)
    captured.replay()
    assert torch.equal(out, expected)
