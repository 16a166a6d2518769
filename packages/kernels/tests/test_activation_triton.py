"""The Triton activations agree with their float64 references, for any size of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.activation import triton as kernels

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu_tanh": gelu_tanh, "gelu": F.gelu, "relu": F.relu}
EXACT["relu_squared"] = lambda x: F.relu(x).square()
EXACT_GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": F.silu,
    "gelu_tanh_and_mul": gelu_tanh,
}


def check(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 7), (2, 1030)], ids=str)
def test_activations_agree_with_float64(
    name: str, shape: tuple[int, ...], triton_dtype: torch.dtype, triton_device: str
) -> None:
    x = (4 * torch.randn(shape, device=triton_device)).to(triton_dtype)
    check(getattr(kernels, name)(x), EXACT[name](x.double()), triton_dtype)


@pytest.mark.parametrize("name", EXACT_GATED)
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 14), (2, 2060)], ids=str)
def test_gated_activations_agree_with_float64(
    name: str, shape: tuple[int, ...], triton_dtype: torch.dtype, triton_device: str
) -> None:
    x = (2 * torch.randn(shape, device=triton_device)).to(triton_dtype)
    gate, up = x.double().chunk(2, dim=-1)
    check(getattr(kernels, name)(x), EXACT_GATED[name](gate) * up, triton_dtype)


@pytest.mark.parametrize("name", ["sigmoid_gate", "silu_gate"])
@pytest.mark.parametrize("gate_size", [1, 1030])
def test_gates_of_another_tensor_agree_with_float64(
    name: str, gate_size: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    x = torch.randn(3, 1035, device=triton_device).to(triton_dtype)[:, 5:]  # slices of wider projections
    gate = torch.randn(3, 1035, device=triton_device).to(triton_dtype)[:, 2 : 2 + gate_size]
    opened = torch.sigmoid(gate.double()) * (gate.double() if name == "silu_gate" else 1)
    check(getattr(kernels, name)(x, gate), x.double() * opened, triton_dtype)


@pytest.mark.parametrize("shape", [(1, 16), (2, 2060)], ids=str)
def test_gates_and_ups_in_turns_are_bounded(
    shape: tuple[int, ...], triton_dtype: torch.dtype, triton_device: str
) -> None:
    x = (4 * torch.randn(shape, device=triton_device)).to(triton_dtype)
    gate, up = x[:, ::2].double().clamp(max=7), x[:, 1::2].double().clamp(-7, 7)
    check(kernels.clamped_swiglu(x, 1.702, 7.0), (up + 1) * gate * torch.sigmoid(1.702 * gate), triton_dtype)


@pytest.mark.parametrize("name", ["gelu_tanh", "gelu", "relu", "relu_squared"])
def test_large_values_neither_overflow_nor_vanish(name: str, triton_device: str) -> None:
    x = torch.tensor([[-1e10, -200.0, -20.0, 0.0, 20.0, 200.0, 1e10]], device=triton_device)
    check(getattr(kernels, name)(x), EXACT[name](x.double()), torch.float32)


def test_a_large_gate_neither_overflows_nor_vanishes(triton_device: str) -> None:
    gate = torch.tensor([[-1e10, -200.0, -20.0, 0.0, 20.0, 200.0, 1e10]], device=triton_device)
    out = kernels.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    check(out, F.silu(gate.double()), torch.float32)


def test_what_is_no_number_stays_none(triton_device: str) -> None:
    x = torch.tensor([[torch.nan, 1.0]], device=triton_device)
    for name in EXACT:
        assert getattr(kernels, name)(x).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_a_soft_cap_holds_and_leaves_small_values(cap: float, triton_device: str) -> None:
    x = torch.cat((torch.linspace(-1000, 1000, 1501), torch.tensor([torch.inf, -torch.inf]))).to(triton_device)
    expected = cap * torch.tanh(x.double() / cap)
    kernels.soft_cap_(x, cap)
    torch.testing.assert_close(x.double(), expected, atol=1e-5, rtol=1e-6)


def test_a_soft_cap_writes_nothing_else(triton_device: str) -> None:
    whole = torch.full((5, 70), 100.0, device=triton_device)
    kernels.soft_cap_(whole[1:3], 30.0)
    assert (whole[[0, 3, 4]] == 100).all()
    assert (whole[1:3] <= 30).all()
    kernels.soft_cap_(whole[:, 3:5], 7.0)  # not contiguous
    assert (whole[:, 3:5] <= 7).all()
    assert (whole[0, 5:] == 100).all()
