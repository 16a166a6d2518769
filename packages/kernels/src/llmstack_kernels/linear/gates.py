"""Activations that gate: a function of the first half of the outputs times the second half."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from llmstack_kernels.activation import gelu_tanh_and_mul, silu_and_mul

GATES: Mapping[str, str] = {"silu_and_mul": "silu", "gelu_tanh_and_mul": "gelu_tanh"}
"""What the first half goes through, by the name of the whole."""

_FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_tanh_and_mul": gelu_tanh_and_mul,
}


def gate(out: torch.Tensor, name: str) -> torch.Tensor:
    """[..., 2 * n] to [..., n], in an operation of its own."""
    return _FUNCTIONS[name](out)
