"""RMS normalisation, with and without the residual addition before it."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension: x / sqrt(mean(x²) + eps) * weight; the mean is taken in float32.

    The weight is of x's type or float32. The normalised row is rounded to the weight's type, scaled, and rounded to
    x's. With a weight of x's type this is how models of the Llama family were trained, with a float32 weight Gemma.
    """
    _check(x, weight)
    out: torch.Tensor = implementation("rms_norm", x.device.type).rms_norm(x, weight, eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of `x` and `residual`, and the sum itself, which is the next residual."""
    _check(x, weight)
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have one shape, got {x.shape} and {residual.shape}.")
    out: tuple[torch.Tensor, torch.Tensor] = implementation("rms_norm", x.device.type).fused_add_rms_norm(
        x, residual, weight, eps
    )
    return out


def gated_rms_norm(
    x: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    gate: torch.Tensor,  # [num_tokens, num_heads, head_dim]; tokens may be slices of a wider projection
    weight: torch.Tensor,  # [head_dim], or [num_heads, head_dim]; of x's type
    eps: float,
    *,
    is_gated_first: bool = False,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """The norm of each head times silu(gate), which is computed in float32.

    With `is_gated_first` it is the norm of x * silu(gate), which is not rounded in between.
    """
    if x.ndim != 3 or (gate.shape, gate.dtype, weight.dtype) != (x.shape, x.dtype, x.dtype):
        raise ValueError(f"gates {gate.shape} and weight must be of the shape {x.shape} and the type {x.dtype}.")
    if weight.shape not in (x.shape[1:], x.shape[2:]):
        raise ValueError(f"weight of shape {weight.shape} does not fit heads of {x.shape[1:]}.")
    backend = implementation("rms_norm", x.device.type)
    out: torch.Tensor = backend.gated_rms_norm(x, gate, weight, eps, is_gated_first)
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight of shape {weight.shape} does not fit rows of {x.shape[-1]}.")
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight of {weight.dtype} does not fit {x.dtype}; the same type or float32 does.")
