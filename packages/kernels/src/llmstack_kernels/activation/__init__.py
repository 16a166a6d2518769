"""Activation functions of feed-forward layers."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension: [..., 2 * n] to [..., n]."""
    return _apply_gated("silu_and_mul", x)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu_tanh(first half) * second half of the last dimension: [..., 2 * n] to [..., n]."""
    return _apply_gated("gelu_tanh_and_mul", x)


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate and up in turns: [..., 2 * n] to [..., n].

    Before, gates are bounded to `limit` above, and ups to ±limit.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension must be even, got {x.shape[-1]}.")
    out: torch.Tensor = implementation("activation", x.device.type).clamped_swiglu(x, alpha, limit)
    return out


def sigmoid_gate(
    x: torch.Tensor,  # [num_tokens, size]
    gate: torch.Tensor,  # [num_tokens, size], or [num_tokens, 1]; tokens may be slices of a wider projection
) -> torch.Tensor:  # [num_tokens, size]
    """x * sigmoid(gate), computed in float32."""
    return _apply_gate("sigmoid_gate", x, gate)


def silu_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * gate * sigmoid(gate), computed in float32; shapes are those of `sigmoid_gate`."""
    return _apply_gate("silu_gate", x, gate)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation (`gelu_new`, `gelu_pytorch_tanh`)."""
    return _apply("gelu_tanh", x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the error function, without approximation."""
    return _apply("gelu", x)


def relu(x: torch.Tensor) -> torch.Tensor:
    """The larger of x and 0, element by element."""
    return _apply("relu", x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """The square of the larger of x and 0, element by element."""
    return _apply("relu_squared", x)


def multiply_columns(
    x: torch.Tensor,  # [..., size]
    factors: torch.Tensor,  # [size] or [1], float32
) -> torch.Tensor:
    """Multiplies each column by its factor, or all columns by one."""
    if factors.dtype != torch.float32 or factors.shape not in (x.shape[-1:], (1,)):
        raise ValueError(f"factors {factors.shape} of {factors.dtype} do not fit {x.shape}.")
    out: torch.Tensor = implementation("activation", x.device.type).multiply_columns(x, factors)
    return out


def soft_cap_(x: torch.Tensor, cap: float) -> None:
    """cap * tanh(x / cap), in place: close to x for small values, never beyond ±cap."""
    if cap <= 0:
        raise ValueError(f"a soft cap must be positive, got {cap}.")
    implementation("activation", x.device.type).soft_cap_(x, cap)


def _apply_gate(name: str, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if x.ndim != 2 or gate.dtype != x.dtype or gate.shape not in (x.shape, (len(x), 1)):
        raise ValueError(f"gates {gate.shape} of {gate.dtype} do not fit {x.shape} of {x.dtype}.")
    out: torch.Tensor = getattr(implementation("activation", x.device.type), name)(x, gate)
    return out


def _apply_gated(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension must be even, got {x.shape[-1]}.")
    return _apply(name, x)


def _apply(name: str, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = getattr(implementation("activation", x.device.type), name)(x)
    return out
