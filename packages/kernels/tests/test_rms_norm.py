"""RMS norms follow their formula, and the fused form is the addition and the norm."""

from __future__ import annotations

import pytest
import torch

from llmstack_kernels.rms_norm import fused_add_rms_norm, gated_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_follows_its_formula(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 7, 48).to(dtype), torch.randn(48).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_a_float32_weight_scales_before_the_row_is_rounded() -> None:
    x, residual = torch.randn(7, 48).bfloat16(), torch.randn(7, 48).bfloat16()
    weight = 1 + torch.randn(48) * 0.1
    wide = (x + residual).float()
    expected = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight).bfloat16()
    assert torch.equal(rms_norm(x + residual, weight, 1e-6), expected)
    assert torch.equal(fused_add_rms_norm(x, residual, weight, 1e-6)[0], expected)
    assert not torch.equal(rms_norm(x + residual, weight.bfloat16(), 1e-6), expected)


def test_the_fused_form_returns_the_sum_and_its_norm() -> None:
    x, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    out, total = fused_add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, rms_norm(x + residual, weight, 1e-6))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = torch.randn(33, 96), torch.randn(96)
    whole = rms_norm(x, weight, 1e-6)
    assert all(torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row]) for row in range(33))


def test_a_gated_norm_is_the_norm_times_silu_of_the_gate() -> None:
    x, gate, weight = torch.randn(5, 3, 16), torch.randn(5, 3, 16), torch.randn(16)
    expected = rms_norm(x, weight, 1e-6) * gate * torch.sigmoid(gate)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6), expected, atol=1e-6, rtol=1e-6)

    weights = torch.randn(3, 16)
    first = torch.stack(
        [rms_norm((x * gate * torch.sigmoid(gate))[:, head], weights[head], 1e-6) for head in range(3)], 1
    )
    torch.testing.assert_close(gated_rms_norm(x, gate, weights, 1e-6, is_gated_first=True), first, atol=1e-6, rtol=1e-6)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="gates"):
        gated_rms_norm(torch.zeros(2, 2, 3), torch.zeros(2, 3), torch.zeros(3), 1e-6)
    with pytest.raises(ValueError, match="does not fit heads"):
        gated_rms_norm(torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), torch.zeros(1, 3), 1e-6)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.zeros(2, 3), torch.zeros(2), 1e-6)
    with pytest.raises(ValueError, match="float16"):
        rms_norm(torch.zeros(2, 3), torch.zeros(3, dtype=torch.float16), 1e-6)
    with pytest.raises(ValueError, match="residual"):
        fused_add_rms_norm(torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(3), 1e-6)
