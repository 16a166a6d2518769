"""Activation functions by the name a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from llmstack_kernels.activation import gelu, gelu_tanh, relu

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function; ValueError where there is none of that name."""
    if name not in _ACTIVATIONS:
        raise ValueError(f"config.json: activation {name[:64]!r} is not supported; {', '.join(_ACTIVATIONS)} are.")
    return _ACTIVATIONS[name]
