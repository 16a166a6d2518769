"""Products with constant factors, which some families multiply hidden states by."""

from __future__ import annotations

import torch

from llmstack_kernels.activation import multiply_columns


class Scale:
    """x times a constant, or each column times one."""

    def __init__(self, factor: float | torch.Tensor, device: torch.device) -> None:
        """`factor`: A number, or one per column [size]."""
        # A number is compared as it is, since a device would be waited for.
        is_one = bool((factor == 1).all()) if isinstance(factor, torch.Tensor) else factor == 1
        self._factors = None if is_one else torch.as_tensor(factor, dtype=torch.float32, device=device).view(-1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] to the same; `x` itself where all factors are 1."""
        return x if self._factors is None else multiply_columns(x, self._factors)
