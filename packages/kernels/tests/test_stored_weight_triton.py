"""Weights of quantized checkpoints on a GPU: computed from their numbers, exactly, and a row's bits are its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.linear import StoredWeight
from llmstack_kernels.linear import triton as kernels
from llmstack_kernels.linear.composed import OrderedLinear
from llmstack_kernels.linear.reference import PlainLinear

# What Triton's own interpreter does to the bounds of a loop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

OUTPUTS, INPUTS = 66, 288
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "int8": ("int8", INPUTS, {}),
    "int8, groups": ("int8", 128, {}),
    "int4_zeros": ("int4", 32, {"has_zeros": True}),
    "int4_zeros, larger groups": ("int4", 64, {"has_zeros": True}),
    "int4_zeros, symmetric": ("int4", INPUTS, {}),
    "mxfp4": ("table4", 32, {"table": E2M1}),
    "mxfp4, one group": ("table4", INPUTS, {"table": E2M1}),
    "fp8": ("fp8", INPUTS, {}),
    "fp8_block": ("fp8", 128, {}),
}


def make(case: str) -> StoredWeight:
    layout, group_size, options = CASES[case]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16 if layout.endswith("4") else 256, (OUTPUTS, INPUTS), generator=generator).to(
        torch.uint8
    )
    if layout == "fp8":
        numbers = torch.where((numbers & 127) == 127, 0, numbers)  # which are NaN
    groups = (OUTPUTS, -(-INPUTS // group_size))
    scales = (torch.rand(groups, generator=generator) + 0.5) / (8 if layout == "int4" else 128)
    if "table" in options:
        scales = torch.ldexp(torch.ones(groups), torch.randint(-9, 3, groups, generator=generator))
    zeros = torch.randint(0, 16, groups, generator=generator).to(torch.uint8) if options.get("has_zeros") else None
    return StoredWeight(layout, numbers, scales.half(), group_size, zeros, options.get("table"))


@pytest.mark.parametrize("case", CASES)
def test_a_layer_computes_what_its_numbers_stand_for_and_rows_are_bit_equal(case: str, triton_device: str) -> None:
    weight = make(case).to(torch.device(triton_device))
    x = torch.randn(18, INPUTS, device=triton_device).half()
    bias = torch.randn(OUTPUTS, device=triton_device).half()
    packed = kernels.pack_stored_linear(weight, torch.float16, bias, is_batch_invariant=True)
    assert isinstance(packed, kernels.TritonLinear)
    assert packed._format == case.partition(",")[0]
    exact = F.linear(x.double(), weight.dequantize(torch.float64), bias.double())
    found = packed(x, out_dtype=torch.float32)
    assert (found - exact).abs().max() <= 1e-5 * exact.abs().max()
    for start, end in ((0, 1), (5, 18)):
        assert torch.equal(packed(x[start:end], out_dtype=torch.float32), found[start:end])
    assert torch.equal(packed.widen(), weight.dequantize(torch.float16))


def test_an_order_of_inputs_is_followed(triton_device: str) -> None:
    weight = make("int4_zeros")
    order = torch.randperm(INPUTS)
    ordered = StoredWeight("int4", weight.numbers, weight.scales, 32, weight.zeros, order=order)
    x = torch.randn(2, INPUTS, device=triton_device).half()
    packed = kernels.pack_stored_linear(ordered.to(torch.device(triton_device)), torch.float16, None)
    assert isinstance(packed, OrderedLinear)
    exact = F.linear(x.double().cpu(), ordered.dequantize(torch.float64))
    assert (packed(x, out_dtype=torch.float32).cpu() - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("table4", {"table": torch.randn(16)}),
        ("table4", {"table": E2M1, "scales": torch.full((OUTPUTS, 9), 0.75)}),
        ("int8", {"zeros": torch.zeros(OUTPUTS, 9, dtype=torch.uint8)}),
        ("int8", {}),
        ("fp8", {}),
    ],
)
def test_what_no_kernel_reads_is_widened(layout: str, options: dict[str, Any], triton_device: str) -> None:
    numbers = torch.randint(0, 16, (OUTPUTS, INPUTS)).to(torch.uint8)
    facts = {"scales": torch.ones(OUTPUTS, 9), "group_size": 32} | options
    weight = StoredWeight(layout, numbers, **facts).to(torch.device(triton_device))
    packed = kernels.pack_stored_linear(weight, torch.float16, None, is_batch_invariant=True)
    assert isinstance(packed, kernels.TritonLinear | PlainLinear)
    assert packed(torch.eye(INPUTS, device=triton_device).half()).equal(weight.dequantize(torch.float16).t())


@pytest.mark.parametrize("scale", [0.0, 2.0**-127, 0.75, -2.0])
def test_a_group_of_zeros_of_mxfp4_has_any_scale(scale: float, triton_device: str) -> None:
    weight = make("mxfp4")
    numbers, scales = weight.numbers.clone(), weight.scales.float()
    numbers[3, 32:64] = torch.tensor([0, 8], dtype=torch.uint8).repeat(16)  # zeros of both signs
    numbers[5, 256:] = 0  # the last group
    scales[3, 1] = scales[5, 8] = scale
    stored = StoredWeight("table4", numbers, scales, 32, table=E2M1).to(torch.device(triton_device))
    packed = kernels.pack_stored_linear(stored, torch.float16, None, is_batch_invariant=True)
    assert isinstance(packed, kernels.TritonLinear)
    assert packed._format == "mxfp4"
    assert packed.widen().equal(stored.dequantize(torch.float16))
    assert packed(torch.eye(INPUTS, device=triton_device).half()).equal(stored.dequantize(torch.float16).t())
