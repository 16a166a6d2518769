"""Activation functions by the name a configuration gives them."""

from __future__ import annotations

from collections.abc import Mapping

_LINEAR_ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_GATED_ACTIVATIONS: Mapping[str, str] = {"gelu_pytorch_tanh": "gelu_tanh_and_mul", "silu": "silu_and_mul"}


def linear_activation(name: str) -> str:
    """What a linear layer calls the activation that it takes along; ValueError where it knows none of that name."""
    return _find(name, _LINEAR_ACTIVATIONS)


def gated_activation(name: str) -> str:
    """What a linear layer calls it where the first half of its outputs gates the second; ValueError likewise."""
    return _find(name, _GATED_ACTIVATIONS)


def _find(name: str, known: Mapping[str, str]) -> str:
    if name not in known:
        raise ValueError(f"config.json: activation {name[:64]!r} is not supported; {', '.join(known)} are.")
    return known[name]
