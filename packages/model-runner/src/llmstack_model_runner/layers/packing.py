"""How linear layers are packed: one choice for a whole model, made around its loading.

Layers pack as soon as they have their weights, so a model quantizes itself while it is loaded inside of
`packed_linears`, without a parameter through the constructors of every model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from llmstack_kernels.linear import PackedLinear, pack_linear


@dataclass(frozen=True, slots=True)
class Packing:
    """The choice: a scheme of `QUANTIZATIONS` or None, and whether rows must not depend on how many there are."""

    quantization: str | None = None
    is_batch_invariant: bool = False


_packing: ContextVar[Packing] = ContextVar("_packing", default=Packing())  # noqa: B039 - it is frozen


@contextmanager
def packed_linears(quantization: str | None = None, is_batch_invariant: bool = False) -> Iterator[None]:
    """Linear layers and output heads packed inside are quantized, or not if it is None, and batch-invariant if so."""
    token = _packing.set(Packing(quantization, is_batch_invariant))
    try:
        yield
    finally:
        _packing.reset(token)


def packing() -> Packing:
    """The choice in force."""
    return _packing.get()


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Pack a weight [out_features, in_features] and an optional bias [out_features] by the choice in force."""
    chosen = packing()
    return pack_linear(weight, bias, chosen.quantization, chosen.is_batch_invariant)
