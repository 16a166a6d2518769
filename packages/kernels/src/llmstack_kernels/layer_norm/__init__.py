"""Layer normalisation, with and without the residual addition before it."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift."""
    _check(x, weight)
    out: torch.Tensor = implementation("layer_norm", x.device.type).layer_norm(x, weight, bias, eps)
    return out


def fused_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised sum of `x` and `residual`, and the sum itself, which is the next residual."""
    _check(x, weight)
    if x.shape != residual.shape:
        raise ValueError(f"x and residual must have one shape, got {x.shape} and {residual.shape}.")
    out: tuple[torch.Tensor, torch.Tensor] = implementation("layer_norm", x.device.type).fused_add_layer_norm(
        x, residual, weight, bias, eps
    )
    return out


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight of shape {weight.shape} does not fit rows of {x.shape[-1]}.")
