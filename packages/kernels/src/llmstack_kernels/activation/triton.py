"""Activation functions on a GPU."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from llmstack_kernels import reference
from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch

# Two loads of 16 bytes of a thread, of 16-bit numbers: of gated values one from each half.
_BLOCK_SIZE = 2048
_GATED_BLOCK_SIZE = 1024


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without an exponential that could overflow."""
    shrunk = tl.exp(-tl.abs(x))
    return tl.where(x < 0, shrunk, 1.0) / (1 + shrunk)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """`x` in float32 through the activation of that name; without a name as it is."""
    if ACTIVATION == "silu":
        return x * sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is sigmoid(2 u), in which nothing cancels: 2 sqrt(2 / pi) = 1.5957691...
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu_squared":
        return tl.where(x < 0, 0.0, x * x)
    else:
        tl.static_assert(ACTIVATION == "none", "there is no activation of that name")
        return x


@triton.jit
def _activation_kernel(
    x,  # [num_rows, row_stride], of which the first `size` are used, with IS_GATED 2 * size
    out,  # [num_rows, size]
    row_stride,
    size,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = column < size
    start = x + row * row_stride
    wait_for_previous()
    values = tl.load(start + column, mask=is_inside, other=0.0)
    if IS_GATED:
        factors = tl.load(start + size + column, mask=is_inside, other=0.0)
        values = activate(values.to(tl.float32), ACTIVATION) * factors.to(tl.float32)
    else:
        values = activate(values.to(tl.float32), ACTIVATION)
    tl.store(out + row * size + column, values.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _clamped_swiglu_kernel(
    x,  # [num_rows, size, 2], gate and up
    out,  # [num_rows, size]
    size,
    alpha,
    limit,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = column < size
    pairs = x + (row * size + column) * 2
    wait_for_previous()
    gate = tl.load(pairs, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(pairs + 1, mask=is_inside, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)  # a NaN stays one
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    values = (up + 1) * (gate * sigmoid(gate * alpha))
    tl.store(out + row * size + column, values.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _soft_cap_kernel(
    x,  # [num_values]
    num_values,
    cap,
    BLOCK_SIZE: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = place < num_values
    wait_for_previous()
    share = tl.load(x + place, mask=is_inside, other=0.0).to(tl.float32) / cap
    shrunk = tl.exp(-2 * tl.abs(share))  # in 0 to 1, so that nothing overflows
    tanh = (1 - shrunk) / (1 + shrunk)
    capped = tl.where(share < 0, -tanh, tanh) * cap
    tl.store(x + place, capped.to(x.dtype.element_ty), mask=is_inside)


@triton.jit
def _gate_kernel(
    x,  # [num_rows, x_stride], of which the first `size` are used
    gate,  # [num_rows, gate_stride], of which the first `gate_size` are used
    out,  # [num_rows, size]
    x_stride,
    gate_stride,
    size,
    gate_size,
    HAS_SILU: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = column < size
    values = tl.load(x + row * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_stride + column % gate_size, mask=is_inside, other=0.0).to(tl.float32)
    factors = sigmoid(opening)
    if HAS_SILU:
        factors *= opening
    tl.store(out + row * size + column, (values * factors).to(out.dtype.element_ty), mask=is_inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by silu of the first."""
    return _run(x, "silu", is_gated=True)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by the approximated GELU of the first."""
    return _run(x, "gelu_tanh", is_gated=True)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Gate and up are in turns."""
    x, size = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    if out.numel():
        grid = (out.numel() // size, triton.cdiv(size, _GATED_BLOCK_SIZE))
        is_early = supports_dependent_launch(x.device)
        launch(
            _clamped_swiglu_kernel, grid, x, out, size, alpha, limit, launch_pdl=is_early, BLOCK_SIZE=_GATED_BLOCK_SIZE
        )
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Rows may be slices of wider projections."""
    return _run_gate(x, gate, has_silu=False)


def silu_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Rows may be slices of wider projections."""
    return _run_gate(x, gate, has_silu=True)


def multiply_columns(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """By PyTorch: models with such factors multiply by few of them."""
    return reference.multiply_columns(x, factors)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation."""
    return _run(x, "gelu_tanh")


def gelu(x: torch.Tensor) -> torch.Tensor:
    return _run(x, "gelu")


def relu(x: torch.Tensor) -> torch.Tensor:
    return _run(x, "relu")


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return _run(x, "relu_squared")


def soft_cap_(x: torch.Tensor, cap: float) -> None:
    """Within ±cap, in place."""
    if not x.is_contiguous():
        reference.soft_cap_(x, cap)
        return
    grid = (triton.cdiv(x.numel(), _BLOCK_SIZE),)
    is_early = supports_dependent_launch(x.device)
    launch(_soft_cap_kernel, grid, x, x.numel(), cap, launch_pdl=is_early, BLOCK_SIZE=_BLOCK_SIZE)


def _run_gate(x: torch.Tensor, gate: torch.Tensor, *, has_silu: bool) -> torch.Tensor:
    x, gate = (one if one.stride(1) == 1 else one.contiguous() for one in (x, gate))
    out = x.new_empty(x.shape)
    if out.numel():
        grid = (len(x), triton.cdiv(x.shape[1], _GATED_BLOCK_SIZE))
        sizes = x.stride(0), gate.stride(0), x.shape[1], gate.shape[1]
        launch(_gate_kernel, grid, x, gate, out, *sizes, HAS_SILU=has_silu, BLOCK_SIZE=_GATED_BLOCK_SIZE)
    return out


def _run(x: torch.Tensor, activation: str, *, is_gated: bool = False) -> torch.Tensor:
    x = x.contiguous()
    row_stride = x.shape[-1]
    size = row_stride // 2 if is_gated else row_stride
    out = x.new_empty((*x.shape[:-1], size))
    if out.numel():
        block_size = _GATED_BLOCK_SIZE if is_gated else _BLOCK_SIZE
        grid = (out.numel() // size, triton.cdiv(size, block_size))
        constants: dict[str, Any] = {"ACTIVATION": activation, "IS_GATED": is_gated, "BLOCK_SIZE": block_size}
        constants["launch_pdl"] = supports_dependent_launch(x.device)
        launch(_activation_kernel, grid, x, out, row_stride, size, **constants)
    return out
