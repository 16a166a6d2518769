"""Products of rounded inputs and weights are exact sums of integers: every backend gives the reference's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels.linear import (
    INT8_DYNAMIC,
    StoredWeight,
    bits_per_weight,
    linear,
    pack_linear,
    pack_stored_linear,
)
from llmstack_kernels.linear.dynamic import DynamicLinear, DynamicWeight, round_rows, round_weight
from llmstack_kernels.linear.native import NativeLinear
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.testing import native_variants

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(70, 64), (130, 257), (7, 3)]


def make(shape: tuple[int, int], dtype: torch.dtype, num_rows: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(size, generator=generator) for size in ((num_rows, shape[1]), shape, shape[:1]))
    x, weight, bias = (part.to(dtype) for part in parts)
    return x, weight, bias


@pytest.mark.parametrize("variant", native_variants(all_named=True))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_layers_have_the_bits_of_the_reference_in_any_batch(dtype: torch.dtype, variant: str) -> None:
    for shape in SHAPES:
        x, weight, bias = make(shape, dtype)
        x[3] = 0.0
        rounded = round_weight(weight)
        packed = NativeLinear.pack_dynamic(rounded, dtype, bias, NativeLibrary(variant))
        expected = DynamicLinear(rounded, bias)(x, out_dtype=torch.float32)
        found = packed(x, out_dtype=torch.float32)
        assert torch.equal(found, expected)
        assert packed(x, "gelu", torch.zeros(11, shape[0], dtype=dtype)).dtype == dtype
        for start, end in ((0, 1), (2, 7), (10, 11)):
            assert torch.equal(packed(x[start:end], out_dtype=torch.float32), expected[start:end])


@pytest.mark.parametrize("variant", native_variants(all_named=True))
def test_the_largest_sums_are_exact(variant: str) -> None:
    in_features = 1 << 17
    weight = torch.ones(2, in_features)
    weight[1] = -1
    packed = NativeLinear.pack_dynamic(round_weight(weight), torch.float32, None, NativeLibrary(variant))
    x = torch.cat([torch.ones(1, in_features), -torch.ones(1, in_features)])
    assert torch.equal(packed(x), DynamicLinear(round_weight(weight), None)(x))
    assert packed(x).sign().tolist() == [[1, -1], [-1, 1]]


def test_more_inputs_than_32_bits_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="up to 131072 inputs, and a layer has 131073"):
        pack_linear(torch.ones(1, (1 << 17) + 1), None, INT8_DYNAMIC)


@pytest.mark.parametrize("variant", native_variants(all_named=True))
def test_a_row_that_is_no_number_stays_one_and_its_neighbours_are_not_affected(variant: str) -> None:
    x, weight, _ = make((70, 64), torch.float32)
    packed = NativeLinear.pack_dynamic(round_weight(weight), torch.float32, None, NativeLibrary(variant))
    expected = packed(x)
    x[2, 5], x[4, 6], x[6] = torch.nan, torch.inf, 1e-38
    found = packed(x)
    assert found[[2, 4]].isnan().all()
    assert not found[6].any()
    others = [0, 1, 3, 5, 7, 8, 9, 10]
    assert torch.equal(found[others], expected[others])
    assert torch.equal(DynamicLinear(round_weight(weight), None)(x)[others], expected[others])


def test_integers_of_a_checkpoint_are_taken_as_they_are() -> None:
    integers = torch.randint(-128, 128, (70, 64)).to(torch.int8)
    scales = torch.rand(70, 1).half()
    stored = StoredWeight("int8", integers.view(torch.uint8) ^ 128, scales, 64)
    x = torch.randn(3, 64).bfloat16()
    packed = pack_stored_linear(stored, torch.bfloat16, input_rounding=INT8_DYNAMIC)
    expected = DynamicLinear(DynamicWeight(integers, scales[:, 0].float()), None)
    assert torch.equal(packed(x, out_dtype=torch.float32), expected(x, out_dtype=torch.float32))
    grouped = StoredWeight("int8", stored.numbers, torch.rand(70, 2), 32)
    found = pack_stored_linear(grouped, torch.float32, input_rounding=INT8_DYNAMIC)(x.float())
    torch.testing.assert_close(found, F.linear(x.float(), grouped.dequantize(torch.float32)), rtol=1e-4, atol=1e-2)


def test_the_factor_of_a_row_is_rounded_once() -> None:
    rows = torch.randn(2000, 8, generator=torch.Generator().manual_seed(5))
    factors = np.float32(127) / rows.abs().amax(1, keepdim=True).numpy()
    assert np.array_equal(round_rows(rows)[0].numpy(), np.rint(rows.numpy() * factors))


def test_rounding_is_to_nearest_of_127_steps() -> None:
    integers, scales = round_rows(torch.tensor([[2.0, -1.0, 0.5, 0.0]]))
    assert integers.tolist() == [[127.0, -64.0, 32.0, 0.0]]  # -63.5 and 31.75: ties to even
    assert scales.tolist() == [torch.tensor(2.0).div(127).item()]


def test_the_scheme_packs_layers_that_lose_little() -> None:
    assert bits_per_weight(INT8_DYNAMIC) == 8
    x, weight, bias = make((130, 257), torch.bfloat16)
    packed = pack_linear(weight, bias, INT8_DYNAMIC)
    assert (packed.in_features, packed.out_features) == (257, 130)
    expected = F.linear(x.float(), weight.float(), bias.float())
    assert (linear(x, packed).float() - expected).norm() < 0.02 * expected.norm()
