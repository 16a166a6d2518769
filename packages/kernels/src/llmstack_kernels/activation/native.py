"""Activation functions in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.native import ACTIVATION_TO_CODE, DTYPE_TO_SUFFIX, Float, Int, Pointer, require_library


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by silu of the first."""
    return _run(x, "silu", is_gated=True)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by the approximated GELU of the first."""
    return _run(x, "gelu_tanh", is_gated=True)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Gate and up are in turns."""
    if x.dtype not in DTYPE_TO_SUFFIX:
        return reference.clamped_swiglu(x, alpha, limit)
    x, size = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    if out.numel():
        name = f"clamped_swiglu_{DTYPE_TO_SUFFIX[x.dtype]}"
        function = require_library().function(name, Pointer, Pointer, Int, Int, Float, Float)
        function(x.data_ptr(), out.data_ptr(), out.numel() // size, size, alpha, limit)
    return out


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Gates may be slices of a wider projection."""
    return _run_gate(x, gate, is_silu=False)


def silu_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Gates may be slices of a wider projection."""
    return _run_gate(x, gate, is_silu=True)


def _run_gate(x: torch.Tensor, gate: torch.Tensor, *, is_silu: bool) -> torch.Tensor:
    if x.dtype not in DTYPE_TO_SUFFIX:
        return reference.silu_gate(x, gate) if is_silu else reference.sigmoid_gate(x, gate)
    x = x.contiguous()
    gate = gate if gate.stride(1) == 1 else gate.contiguous()
    out = torch.empty_like(x)
    function = require_library().function(
        f"sigmoid_gate_{DTYPE_TO_SUFFIX[x.dtype]}", Pointer, Pointer, Int, Pointer, Int, Int, Int, Int
    )
    is_single = gate.shape[1] < x.shape[1]
    function(x.data_ptr(), gate.data_ptr(), gate.stride(0), out.data_ptr(), *x.shape, is_single, is_silu)
    return out


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation."""
    return _run(x, "gelu_tanh")


def gelu(x: torch.Tensor) -> torch.Tensor:
    return _run(x, "gelu")


def relu(x: torch.Tensor) -> torch.Tensor:
    return _run(x, "relu")


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    return _run(x, "relu_squared")


def multiply_columns(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """In one pass, rounded once."""
    if x.dtype not in DTYPE_TO_SUFFIX:
        return reference.multiply_columns(x, factors)
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    name = f"multiply_columns_{DTYPE_TO_SUFFIX[x.dtype]}"
    function = require_library().function(name, Pointer, Pointer, Int, Pointer, Int, Int)
    function(x.data_ptr(), factors.data_ptr(), factors.shape[0] < size, out.data_ptr(), x.numel() // size, size)
    return out


def soft_cap_(x: torch.Tensor, cap: float) -> None:
    """Limits `x` smoothly to ±cap, in place."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        reference.soft_cap_(x, cap)
        return
    size = x.shape[-1]
    function = require_library().function("soft_cap", Pointer, Int, Int, Float)
    function(x.data_ptr(), x.numel() // size, size, cap)


def _run(x: torch.Tensor, activation: str, *, is_gated: bool = False) -> torch.Tensor:
    if x.dtype not in DTYPE_TO_SUFFIX:
        fallback: torch.Tensor = getattr(reference, f"{activation}_and_mul" if is_gated else activation)(x)
        return fallback
    x = x.contiguous()
    size = x.shape[-1] // 2 if is_gated else x.shape[-1]
    out = x.new_empty((*x.shape[:-1], size))
    if not out.numel():
        return out
    function = require_library().function(
        f"activation_{DTYPE_TO_SUFFIX[x.dtype]}", Pointer, Pointer, Int, Int, Int, Int
    )
    function(x.data_ptr(), out.data_ptr(), out.numel() // size, size, ACTIVATION_TO_CODE[activation], is_gated)
    return out
