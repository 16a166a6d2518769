"""Activation functions by the name a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from llmstack_kernels.activation import gelu_tanh_and_mul, silu_and_mul

_Found = TypeVar("_Found")

_LINEAR_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_GATED_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
    "silu": silu_and_mul,
}


def linear_activation(name: str) -> str:
    """What a linear layer calls the activation that it takes along; ValueError where it knows none of that name."""
    return _find(name, _LINEAR_ACTIVATIONS)


def gated_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that gates the second half of a row by the first; ValueError where there is none of that name."""
    return _find(name, _GATED_ACTIVATIONS)


def _find(name: str, known: Mapping[str, _Found]) -> _Found:
    if name not in known:
        raise ValueError(f"config.json: activation {name[:64]!r} is not supported; {', '.join(known)} are.")
    return known[name]
