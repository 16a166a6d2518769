"""Products with constant factors, which some families multiply hidden states by."""

from __future__ import annotations

import torch

from llmstack_kernels.activation import multiply_columns


class Scale:
    """x times a constant, or each column times one."""

    def __init__(self, factor: float | torch.Tensor, device: torch.device) -> None:
        """`factor`: A number, or one per column [size]."""
        factors = torch.as_tensor(factor, dtype=torch.float32, device=device).view(-1)
        self._factors = None if bool((factors == 1).all()) else factors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same; `x` itself where all factors are 1."""
        return x if self._factors is None else multiply_columns(x, self._factors)
