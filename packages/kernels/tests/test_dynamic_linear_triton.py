"""Layers of a GPU with rounded inputs have the bits of the reference, for any shape and number of rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.grouped_linear.triton import pack_experts
from llmstack_kernels.linear import ACTIVATIONS, GATED_ACTIVATIONS, INT8_DYNAMIC, linear
from llmstack_kernels.linear.dynamic import DynamicLinear, DynamicWeight, round_weight
from llmstack_kernels.linear.triton import pack_dynamic_linear
from llmstack_kernels.linear.triton_dynamic import TritonDynamicLinear

# What Triton's own interpreter does to the bounds of a loop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

SHAPES = [(70, 64), (130, 257), (7, 3), (40, 5000)]


def make(
    shape: tuple[int, int], num_rows: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, DynamicWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(size, generator=generator) for size in ((num_rows, shape[1]), shape, shape[:1]))
    x, weight, bias = (part.to(device, dtype) for part in parts)
    return x, round_weight(weight), bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_have_the_bits_of_the_reference_in_any_batch(
    shape: tuple[int, int], triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, weight, bias = make(shape, 70, triton_dtype, triton_device)
    x[3] = 0.0
    packed = TritonDynamicLinear(weight, bias)
    expected = DynamicLinear(weight, bias)(x, out_dtype=torch.float32)
    for start, end in ((0, 70), (0, 1), (2, 7), (10, 43)):
        assert torch.equal(linear(x[start:end], packed, out_dtype=torch.float32), expected[start:end])


def test_inputs_are_rounded_to_the_nearest_and_halves_to_the_even_one(triton_device: str) -> None:
    x = torch.tensor([[2.0, -1.0, 0.5, 0.0], [127.0, 2.5, -3.5, 126.4999]], device=triton_device)
    packed = TritonDynamicLinear(DynamicWeight(torch.eye(4).to(triton_device, torch.int8), torch.ones(4).to(x)), None)
    integers, scales = packed._round(x)
    assert integers[:, :4].tolist() == [[127, -64, 32, 0], [127, 2, -4, 126]]
    assert not integers[:, 4:].any()
    assert scales.tolist() == [torch.tensor(2.0).div(127).item(), 1.0]


def test_the_largest_sums_are_exact(triton_device: str) -> None:
    in_features = 1 << 17
    integers = torch.full((2, in_features), 127, dtype=torch.int8, device=triton_device)
    integers[1] = -127
    weight = DynamicWeight(integers, torch.ones(2, device=triton_device))
    x = torch.ones(1, in_features, device=triton_device)
    x[0, 1:3] = -1.0
    assert torch.equal(TritonDynamicLinear(weight, None)(x), DynamicLinear(weight, None)(x))


def test_a_row_that_is_no_number_stays_one_and_its_neighbours_are_not_affected(triton_device: str) -> None:
    x, weight, _ = make((70, 64), 11, torch.float32, triton_device)
    packed = TritonDynamicLinear(weight, None)
    expected = packed(x)
    x[2, 5], x[4, 6], x[6] = torch.nan, torch.inf, 1e-38
    found = packed(x)
    assert found[[2, 4]].isnan().all()
    assert not found[6].any()
    others = [0, 1, 3, 5, 7, 8, 9, 10]
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED_ACTIVATIONS])
def test_what_follows_the_product_is_rounded_once(
    activation: str, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, weight, bias = make((64, 96), 5, triton_dtype, triton_device)
    width = 32 if activation in GATED_ACTIVATIONS else 64
    residual = torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(triton_device, triton_dtype)
    found = linear(x, TritonDynamicLinear(weight, bias), activation, residual)
    expected = DynamicLinear(weight, bias)(x.float(), activation, residual.float())
    assert found.dtype == triton_dtype
    tolerance = 1e-5 if triton_dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_experts_are_refused_and_layers_are_not(triton_device: str) -> None:
    weights = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)).to(triton_device)
    with pytest.raises(ValueError, match="int8_dynamic is not computed for experts on a GPU"):
        pack_experts(weights, INT8_DYNAMIC)
    packed = pack_dynamic_linear(round_weight(weights[0]), weights.dtype, None)
    assert isinstance(packed, TritonDynamicLinear)
    assert (packed.out_features, packed.in_features) == (64, 32)


def test_rows_that_lie_apart_are_read_where_they_lie(triton_device: str) -> None:
    x, weight, _ = make((70, 64), 6, torch.float32, triton_device)
    packed = TritonDynamicLinear(weight, None)
    apart = torch.full((6, 100), torch.nan, device=triton_device)
    apart[:, :64] = x
    assert torch.equal(packed(apart[:, :64]), packed(x))
    assert torch.equal(packed(x.t().contiguous().t()), packed(x))
    assert torch.equal(packed(x.view(2, 3, 64)), packed(x).view(2, 3, 70))
