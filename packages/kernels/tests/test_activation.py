"""Activations follow their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from llmstack_kernels.activation import (
    clamped_swiglu,
    gelu,
    gelu_tanh,
    gelu_tanh_and_mul,
    multiply_columns,
    relu,
    relu_squared,
    silu_and_mul,
)


def test_activations_follow_their_formulas() -> None:
    x = torch.linspace(-6, 6, 101)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu_tanh(x), 0.5 * x * (1 + inner.tanh()), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gelu(x), 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), atol=1e-6, rtol=1e-5)
    assert torch.equal(relu(x), x.clamp(min=0))
    assert torch.equal(relu_squared(x), x.clamp(min=0).square())


def test_columns_are_multiplied_by_their_factors() -> None:
    x = torch.randn(3, 8)
    for factors in (torch.randn(8), torch.tensor([0.3])):
        assert torch.equal(multiply_columns(x, factors), x * factors)
    with pytest.raises(ValueError, match="factors"):
        multiply_columns(x, torch.randn(7))


def test_the_first_half_gates_the_second() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), dim=-1)), gate * torch.sigmoid(gate) * up)
    torch.testing.assert_close(gelu_tanh_and_mul(torch.cat((gate, up), dim=-1)), gelu_tanh(gate) * up)
    for function in (silu_and_mul, gelu_tanh_and_mul, lambda x: clamped_swiglu(x, 1.7, 7.0)):
        with pytest.raises(ValueError, match="even"):
            function(torch.zeros(2, 3))


@pytest.mark.parametrize("size", [1, 7, 8, 16, 37])
def test_gates_and_ups_in_turns_are_bounded(size: int) -> None:
    x = 6 * torch.randn(5, 2 * size)
    x[0, :2] = torch.tensor([50.0, -50.0])
    gate, up = x[:, ::2].double().clamp(max=7), x[:, 1::2].double().clamp(-7, 7)
    exact = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    torch.testing.assert_close(clamped_swiglu(x, 1.702, 7.0).double(), exact, atol=2e-5, rtol=1e-6)
    alone = torch.cat([clamped_swiglu(row[None], 1.702, 7.0) for row in x])
    assert torch.equal(clamped_swiglu(x, 1.702, 7.0), alone)
    assert clamped_swiglu(torch.full((1, 2 * size), torch.nan), 1.702, 7.0).isnan().all()
