"""The Triton norms agree with their float64 reference, for any size and layout of rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels import reference
from llmstack_kernels.rms_norm import triton as kernels

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 64), (3, 7, 48), (17, 100)], ids=str)
def test_the_norm_agrees_with_float64(shape: tuple[int, ...], triton_dtype: torch.dtype, triton_device: str) -> None:
    x = torch.randn(shape, device=triton_device).to(triton_dtype)
    weight = torch.randn(shape[-1], device=triton_device).to(triton_dtype)
    out = kernels.rms_norm(x, weight, 1e-5)
    assert out.dtype == triton_dtype
    tolerance = TOLERANCE[triton_dtype]
    torch.testing.assert_close(out.double(), exact(x, weight, 1e-5), atol=tolerance, rtol=tolerance)


def test_heads_may_be_slices_of_a_wider_projection(triton_dtype: torch.dtype, triton_device: str) -> None:
    projection = torch.randn(5, 6 * 32, device=triton_device).to(triton_dtype)
    heads = projection.view(5, 6, 32)[:, 1:4]
    weight = torch.ones(32, device=triton_device, dtype=triton_dtype)
    assert torch.equal(kernels.rms_norm(heads, weight, 1e-6), kernels.rms_norm(heads.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_the_fused_form_returns_the_sum_and_its_norm(
    num_rows: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, residual, weight = (torch.randn(num_rows, 72, device=triton_device).to(triton_dtype) for _ in range(3))
    out, total = kernels.fused_add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, kernels.rms_norm(total, weight[0], 1e-6))


@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("weight_shape", [(40,), (3, 40)], ids=str)
def test_gated_norms_agree_with_the_reference(
    is_gated_first: bool, weight_shape: tuple[int, ...], triton_dtype: torch.dtype, triton_device: str
) -> None:
    x, gate = (torch.randn(5, 9, 40, device=triton_device).to(triton_dtype)[:, 3:6] for _ in range(2))
    weight = torch.randn(weight_shape, device=triton_device).to(triton_dtype)
    expected = reference.gated_rms_norm(x, gate, weight, 1e-5, is_gated_first)
    out = kernels.gated_rms_norm(x, gate, weight, 1e-5, is_gated_first)
    assert out.dtype == triton_dtype
    tolerance = TOLERANCE[triton_dtype] * 4
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_a_float32_weight_scales_before_the_row_is_rounded(triton_device: str) -> None:
    x, weight = torch.randn(4, 40, device=triton_device).half(), 1 + 0.1 * torch.randn(40, device=triton_device)
    expected = exact(x, weight, 1e-6).half()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), expected, atol=1e-3, rtol=1e-3)


def test_a_row_does_not_depend_on_its_neighbours(triton_dtype: torch.dtype, triton_device: str) -> None:
    x = torch.randn(9, 96, device=triton_device).to(triton_dtype)
    weight = torch.randn(96, device=triton_device).to(triton_dtype)
    whole = kernels.rms_norm(x, weight, 1e-6)
    assert all(torch.equal(kernels.rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row]) for row in range(9))
