"""How linear layers are packed: one choice for a whole model, made around its loading.

Layers pack as soon as they have their weights, so a model quantizes itself while it is loaded inside of
`quantized_linears`, without a parameter through the constructors of every model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from llmstack_kernels.linear import PackedLinear, pack_linear

_quantization: ContextVar[str | None] = ContextVar("quantization", default=None)


@contextmanager
def quantized_linears(scheme: str | None) -> Iterator[None]:
    """Linear layers and output heads packed inside are quantized by `scheme`, or not if it is None."""
    token = _quantization.set(scheme)
    try:
        yield
    finally:
        _quantization.reset(token)


def quantization() -> str | None:
    """The scheme in force."""
    return _quantization.get()


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Pack a weight [out_features, in_features] and an optional bias [out_features] by the scheme in force."""
    return pack_linear(weight, bias, quantization())
