"""Layer normalisation."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise the last dimension to mean 0 and variance 1, then scale and shift."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight of shape {weight.shape} does not fit rows of {x.shape[-1]}.")
    out: torch.Tensor = implementation("layer_norm", x.device.type).layer_norm(x, weight, bias, eps)
    return out
