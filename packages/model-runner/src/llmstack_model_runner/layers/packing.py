"""Packing of linear layers: quantization and batch invariance of a whole model.

The choice is a context around construction and loading. Layers pack when they have their weights, so no model's
constructor needs a parameter for it.
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
    """A scheme of `QUANTIZATIONS` or None, and whether a row's result must not depend on the number of rows."""

    quantization: str | None = None
    is_batch_invariant: bool = False


_packing: ContextVar[Packing] = ContextVar("_packing", default=Packing())  # noqa: B039 - it is frozen


@contextmanager
def packed_linears(quantization: str | None = None, is_batch_invariant: bool = False) -> Iterator[None]:
    """Quantizes linear layers and output heads that are packed inside the block, or makes them batch-invariant."""
    token = _packing.set(Packing(quantization, is_batch_invariant))
    try:
        yield
    finally:
        _packing.reset(token)


def packing() -> Packing:
    """The packing that applies in this context."""
    return _packing.get()


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Packs a weight [out_features, in_features] and a bias [out_features] as the context says."""
    chosen = packing()
    return pack_linear(weight, bias, chosen.quantization, chosen.is_batch_invariant)
