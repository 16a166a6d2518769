"""Inputs rounded by segments: every variant gives the same bits, for weights of numbers and for blocks of a file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kernels.linear import (
    BLOCK_TYPES,
    INT4_DYNAMIC,
    INT8_DYNAMIC,
    BlockWeight,
    StoredWeight,
    bits_per_weight,
    join_stored,
    linear_of_packed,
    pack_linear,
    pack_stored_linear,
    packed_weights,
    packing_version,
)
from llmstack_kernels.linear.block_weight import _are_finite
from llmstack_kernels.linear.native_segments import pack_blocks, pack_segments
from llmstack_kernels.linear.segments import SegmentLinear, fits_segments, round_segments
from llmstack_kernels.native import NativeLibrary, supported_variants
from llmstack_kernels.testing import native_variants

needs_native = pytest.mark.skipif(not supported_variants(), reason="the native kernels are not built")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(bits: int, shape: tuple[int, int, int], seed: int = 0, **parts: Any) -> StoredWeight:
    out_features, in_features, group_size = shape
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << bits, (out_features, in_features), generator=generator).to(torch.uint8)
    groups = (out_features, -(-in_features // group_size))
    scales = (torch.rand(groups, generator=generator) + 0.5).to(parts.pop("scale_dtype", torch.float16))
    if parts.pop("has_zeros", False):
        parts["zeros"] = torch.randint(0, 1 << bits, groups, generator=generator).to(torch.uint8)
    if parts.pop("has_order", False):
        parts["order"] = torch.randperm(in_features, generator=generator)
    return StoredWeight(f"int{bits}", numbers, scales, group_size, **parts)


def make_blocks(block_type: str, out_features: int, num_blocks: int, seed: int = 0) -> BlockWeight:
    generator = torch.Generator().manual_seed(seed)
    block = BLOCK_TYPES[block_type]
    size = (out_features, num_blocks, block.num_bytes)
    blocks = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    for start in block.scales:
        scales = torch.rand(size[:2], generator=generator).half() + 0.01
        blocks.view(torch.int16)[..., start // 2] = scales.view(torch.int16)
    return BlockWeight(block_type, (blocks,), _unread)


def _unread(blocks: torch.Tensor) -> StoredWeight:
    raise AssertionError("layers with rounded inputs are packed from the blocks")


def rows_of(num_rows: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    spread = torch.randn(num_rows, in_features).exp()  # inputs of some segments are far larger than those of others
    return (torch.randn(num_rows, in_features) * spread).to(dtype)


@needs_native
@settings(deadline=None, max_examples=25)
@given(
    bits=st.sampled_from([4, 8]),
    sizes=st.tuples(st.integers(1, 140), st.integers(1, 300), st.sampled_from([32, 64, 128, 0])),
    num_rows=st.integers(1, 11),
    dtype=st.sampled_from(DTYPES),
    parts=st.fixed_dictionaries({
        "has_zeros": st.booleans(), "has_order": st.booleans(), "scale_dtype": st.sampled_from(DTYPES)
    }),
)  # fmt: skip
def test_all_variants_give_the_same_bits_for_any_size_and_number_of_rows(
    bits: int, sizes: tuple[int, int, int], num_rows: int, dtype: torch.dtype, parts: dict[str, Any]
) -> None:
    out_features, in_features, group_size = sizes
    weight = make(bits, (out_features, in_features, group_size or in_features), **parts)
    x, bias = rows_of(num_rows, in_features, dtype), torch.randn(out_features).to(dtype)
    layers = [pack_segments(weight, dtype, bias, NativeLibrary(name)) for name in supported_variants()]
    first, *others = [layer(x, out_dtype=torch.float32) for layer in layers]
    assert all(torch.equal(found, first) for found in others)
    for layer in layers:
        assert torch.equal(layer(x[-1:], out_dtype=torch.float32), first[-1:])
    expected = SegmentLinear(weight, bias)(x, out_dtype=torch.float32)
    assert (first - expected).abs().max() <= 4e-6 * (1 + expected.abs().max())


@pytest.mark.parametrize("variant", native_variants())
@pytest.mark.parametrize("out_features", [70, 1100], ids=["shared_panels", "panels_of_a_thread"])
def test_rows_of_several_blocks_have_the_bits_of_a_row_alone(out_features: int, variant: str) -> None:
    layer = pack_segments(make(4, (out_features, 300, 32)), torch.float32, None, NativeLibrary(variant))
    x = rows_of(200, 300, torch.float32)
    alone = torch.cat([layer(x[row : row + 1]) for row in range(200)])
    for num_rows in (95, 96, 97, 191, 193, 200):
        assert torch.equal(layer(x[:num_rows]), alone[:num_rows])


@needs_native
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
def test_all_variants_give_the_same_bits_for_blocks_of_a_file_in_any_order_of_rows(block_type: str) -> None:
    order = torch.randperm(70)
    weight = make_blocks(block_type, 70, 2)
    joined = join_stored([weight.rows(order), weight])
    assert isinstance(joined, BlockWeight)
    assert joined.shape == (140, weight.shape[1])
    x = rows_of(9, weight.shape[1], torch.bfloat16)
    found = [pack_blocks(joined, torch.bfloat16, None, NativeLibrary(name))(x) for name in supported_variants()]
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.equal(found[0][:, :70], found[0][:, 70:][:, order])


@pytest.mark.parametrize("variant", native_variants())
def test_a_segment_that_is_no_number_stays_one_and_other_rows_are_not_affected(variant: str) -> None:
    packed = pack_segments(make(4, (70, 64, 32)), torch.float32, None, NativeLibrary(variant))
    x = torch.randn(7, 64)
    expected = packed(x)
    x[2, 5], x[4, 60], x[6] = torch.nan, torch.inf, 1e-38
    found = packed(x)
    assert found[[2, 4]].isnan().all()
    assert not found[6].any()
    assert torch.equal(found[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


def test_a_segment_is_rounded_to_127_steps_of_its_own_largest_input() -> None:
    rounded = round_segments(torch.tensor([[2.0, -1.0, 0.5, 0.0, 200.0, 100.0]]), 4)
    scales = torch.tensor([2.0, 200.0]) / 127
    assert torch.equal(rounded, torch.tensor([[127, -64, 32, 0, 127, 64]]) * scales.repeat_interleave(4)[:6])


def test_the_scheme_rounds_weights_as_int4_and_inputs_cost_little() -> None:
    assert bits_per_weight(INT4_DYNAMIC) == bits_per_weight("int4")
    x, weight = torch.randn(20, 512), torch.randn(130, 512)
    exact = pack_linear(weight, None, "int4")(x)
    assert 1e-4 < ((pack_linear(weight, None, INT4_DYNAMIC)(x) - exact).norm() / exact.norm()).item() < 0.01


def test_weights_that_do_not_fit_segments_keep_exact_inputs() -> None:
    x = torch.randn(3, 96)
    for weight in (
        make(4, (8, 96, 16)),
        make(4, (8, 96, 32), zeros=torch.rand(8, 3)),
        StoredWeight("fp8", torch.ones(8, 96, dtype=torch.uint8), torch.ones(8, 3), 32),
    ):
        assert not fits_segments(weight)
        packed = pack_stored_linear(weight, torch.float32, input_rounding=INT4_DYNAMIC)
        torch.testing.assert_close(packed(x), F.linear(x, weight.dequantize(torch.float32)), rtol=1e-4, atol=1e-4)
    fitting = make(4, (8, 96, 32))
    rounded = pack_stored_linear(fitting, torch.float32, input_rounding=INT4_DYNAMIC)(x)
    assert not torch.equal(rounded, pack_stored_linear(fitting, torch.float32, input_rounding=INT8_DYNAMIC)(x))


def test_a_scale_of_a_block_that_is_no_number_is_refused() -> None:
    blocks = make_blocks("Q4_K", 3, 2).parts[0]
    blocks[1, 1, 2:4] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    damaged = BlockWeight("Q4_K", (blocks,), _unread)
    assert not _are_finite(damaged)
    with pytest.raises(ValueError, match="a scale is NaN or infinite"):
        damaged.check()
    make_blocks("Q4_K", 3, 2).check()


def test_inputs_of_blocks_are_cut_between_blocks() -> None:
    weight = make_blocks("Q6_K", 5, 3)
    cut = weight.columns(range(256, 768))
    assert isinstance(cut, BlockWeight)
    assert cut.shape == (5, 512)
    assert torch.equal(cut.parts[0], weight.parts[0][:, 1:])


@pytest.mark.skipif(not packing_version("cpu"), reason="only native kernels have packed weights")
def test_layers_of_kept_weights_compute_the_same_bits() -> None:
    weights = [make(4, (70, 64, 32), has_order=True), make(8, (70, 64, 64), has_zeros=True), make_blocks("Q4_1", 70, 2)]
    x = torch.randn(3, 64).bfloat16()
    for weight in weights:
        layer = pack_stored_linear(weight, torch.bfloat16, input_rounding=INT4_DYNAMIC)
        kept = packed_weights(layer)
        assert kept is not None
        assert torch.equal(linear_of_packed(kept, None)(x), layer(x))
