"""The Triton layer norms agree with their float64 reference, for any size of rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels import reference
from llmstack_kernels.layer_norm import triton as kernels

TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return scaled if bias is None else scaled + bias.double()


@pytest.mark.parametrize("shape", [(1, 64), (3, 7, 48), (17, 100), (2, 1030)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_norm_agrees_with_float64(
    shape: tuple[int, ...], has_bias: bool, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x = (3 + torch.randn(shape, device=triton_device)).to(triton_dtype)  # a mean that must be taken away
    weight, bias = torch.randn(2, shape[-1], device=triton_device).to(triton_dtype)
    out = kernels.layer_norm(x, weight, bias if has_bias else None, 1e-5)
    assert out.dtype == triton_dtype
    tolerance = TOLERANCE[triton_dtype]
    expected = exact(x, weight, bias if has_bias else None, 1e-5)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_the_fused_form_returns_the_sum_and_its_norm(
    num_rows: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, residual, weight = (torch.randn(num_rows, 72, device=triton_device).to(triton_dtype) for _ in range(3))
    out, total = kernels.fused_add_layer_norm(x, residual, weight[0], None, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, kernels.layer_norm(total, weight[0], None, 1e-6))
    expected, expected_total = reference.fused_add_layer_norm(x, residual, weight[0], None, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[triton_dtype], rtol=TOLERANCE[triton_dtype])


def test_a_row_does_not_depend_on_its_neighbours(triton_dtype: torch.dtype, triton_device: str) -> None:
    x = torch.randn(19, 96, device=triton_device).to(triton_dtype)
    weight = torch.randn(96, device=triton_device).to(triton_dtype)
    whole = kernels.layer_norm(x, weight, weight, 1e-6)
    assert all(
        torch.equal(kernels.layer_norm(x[row : row + 1], weight, weight, 1e-6)[0], whole[row]) for row in (0, 7, 18)
    )


def test_neighbours_that_are_no_numbers_do_not_spread(triton_device: str) -> None:
    x = torch.randn(9, 40, device=triton_device)
    x[[0, 3, 8]] = torch.nan
    out = kernels.layer_norm(x, torch.ones(40, device=triton_device), None, 1e-6)
    assert out.isnan().all(dim=1).nonzero().flatten().tolist() == [0, 3, 8]
    assert int(out.isnan().sum()) == 3 * 40
