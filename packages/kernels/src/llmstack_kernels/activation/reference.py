"""Activation functions in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by silu of the first."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half of each row by the approximated GELU of the first."""
    gate, up = x.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU, tanh approximation."""
    return F.gelu(x, approximate="tanh")


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU, exact."""
    return F.gelu(x)


def relu(x: torch.Tensor) -> torch.Tensor:
    """Rectifier."""
    return F.relu(x)


def soft_cap_(x: torch.Tensor, cap: float) -> None:
    """Within ±cap, in place."""
    x.div_(cap).tanh_().mul_(cap)
