"""The Triton causal convolution agrees with the reference, and no cut of a row changes a bit."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers.states import make_rows

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.causal_convolution import reference
from llmstack_kernels.causal_convolution import triton as kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(("length", "num_channels"), [(2, 5), (3, 64), (4, 150)])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_rows_and_drafts_agree_with_the_reference(
    length: int, num_channels: int, activation: str, triton_dtype: torch.dtype, triton_device: str
) -> None:
    inputs = torch.randn(23, num_channels + 3, device=triton_device).to(triton_dtype)[:, 3:]  # slices of a projection
    taps = torch.randn(length, num_channels, device=triton_device)
    bias = torch.randn(num_channels, device=triton_device) if activation == "silu" else None
    storage = torch.randn(9, length, num_channels, device=triton_device).to(triton_dtype)
    tails, expected_tails = storage[:, 1:], storage.clone()[:, 1:]  # of other layers too
    rows = make_rows([18, 1, 3, 1], [18, 0, 2, 1], device=triton_device)
    expected = reference.causal_convolution(inputs, taps, bias, expected_tails, rows, activation)
    out = kernels.causal_convolution(inputs, taps, bias, tails, rows, activation)
    assert out.dtype == triton_dtype
    tolerance = TOLERANCE[triton_dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(tails, expected_tails)


def test_no_cut_changes_a_bit(triton_device: str) -> None:
    inputs, taps = torch.randn(24, 6, device=triton_device), torch.randn(4, 6, device=triton_device)
    tails = torch.randn(9, 3, 6, device=triton_device)
    whole = kernels.causal_convolution(inputs, taps, None, tails, make_rows([24], device=triton_device), "none")
    expected, start = tails[2].clone(), 0
    for block, count in enumerate([1, 2, 21], start=1):
        own = slice(start, start + count)
        rows = make_rows([count], None, block, triton_device)
        assert torch.equal(kernels.causal_convolution(inputs[own], taps, None, tails, rows, "none"), whole[own])
        start += count
    assert torch.equal(tails[4], expected)
