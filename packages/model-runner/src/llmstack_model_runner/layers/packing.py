"""Packing of linear layers: quantization and batch invariance of a whole model.

The choice is a context around construction and loading. Layers pack when they have their weights, so no model's
constructor needs a parameter for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from llmstack_kernels.grouped_linear import (
    PackedExperts,
    are_one_tensor,
    expert_layers,
    join_experts,
    pack_stored_experts,
)
from llmstack_kernels.linear import (
    AnyStoredWeight,
    PackedLinear,
    PackedWeight,
    concatenate_linears,
    join_stored,
    linear_of_packed,
    pack_linear,
    pack_stored_linear,
)


class PackedWeights(Protocol):
    """Weights that were packed before, and those that are packed now, by the names of their layers."""

    @property
    def is_hit(self) -> bool:
        """Whether weights were packed before."""
        ...

    def has(self, name: str, shape: tuple[int, int]) -> bool:
        """Whether a layer of this name and shape [out_features, in_features] was packed before."""
        ...

    def read(self, name: str) -> Sequence[PackedWeight]:
        """The weights of such a layer, whose outputs follow one another."""
        ...

    def keep(self, name: str, packed: PackedLinear) -> None:
        """Notes a layer that was packed now."""
        ...


@dataclass(frozen=True, slots=True)
class Packing:
    """How layers are packed.

    Attributes:
        quantization: The format to which weights in full precision are rounded, or None.
        is_batch_invariant: Whether a row's result must not depend on the number of rows.
        input_rounding: How layers of quantized checkpoints round their inputs where their weights allow: by
            `INT8_DYNAMIC`, `INT4_DYNAMIC` or not.
        weights: Where packed weights are found and kept; None where they are not.
    """

    quantization: str | None = None
    is_batch_invariant: bool = False
    input_rounding: str | None = None
    weights: PackedWeights | None = None


_packing: ContextVar[Packing] = ContextVar("_packing", default=Packing())  # noqa: B039 - it is frozen


@contextmanager
def packed_linears(
    quantization: str | None = None,
    is_batch_invariant: bool = False,
    input_rounding: str | None = None,
    weights: PackedWeights | None = None,
) -> Iterator[None]:
    """Quantizes linear layers and output heads that are packed inside the block, or makes them batch-invariant."""
    token = _packing.set(Packing(quantization, is_batch_invariant, input_rounding, weights))
    try:
        yield
    finally:
        _packing.reset(token)


def packing() -> Packing:
    """The packing that applies in this context."""
    return _packing.get()


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, name: str = "", *, keeps_precision: bool = False
) -> PackedLinear:
    """Packs a weight [out_features, in_features] and a bias [out_features] as the context says.

    `name`: The name of the layer, unique in its model; a layer without one is not kept.
    `keeps_precision`: The weight is not rounded, whatever the context says.
    """
    chosen = packing()
    scheme = None if keeps_precision else chosen.quantization
    packed = pack_linear(weight, bias, scheme, chosen.is_batch_invariant)
    if chosen.weights is not None and name:
        chosen.weights.keep(name, packed)
    return packed


def is_packed(name: str, shape: tuple[int, int]) -> bool:
    """Whether the weight of a layer was packed before, so that the checkpoint's need not be read."""
    weights = packing().weights
    return weights is not None and weights.has(name, shape)


def are_packed(name: str, shape: tuple[int, int, int]) -> bool:
    """Whether the weights [num_experts, out_features, in_features] of all experts of a rank are packed."""
    return all(is_packed(f"{name}.{number}", shape[1:]) for number in range(shape[0]))


def keep_experts(name: str, experts: PackedExperts) -> PackedExperts:
    """Notes experts that were packed in this start, unless they are packed together."""
    weights, layers = packing().weights, expert_layers(experts)
    if weights is not None and layers is not None:
        for number, layer in enumerate(layers):
            weights.keep(f"{name}.{number}", layer)
    return experts


def experts_packed_before(name: str, num_experts: int) -> PackedExperts:
    """Experts whose weights were packed before."""
    return join_experts([packed_before(f"{name}.{number}", None) for number in range(num_experts)])


def packed_before(name: str, bias: torch.Tensor | None) -> PackedLinear:
    """The layer of a weight that was packed before."""
    weights = packing().weights
    if weights is None:
        raise RuntimeError(f"the layer {name} was not packed before")
    return linear_of_packed(weights.read(name), bias)


def pack_parts(
    parts: Sequence[torch.Tensor | AnyStoredWeight], bias: torch.Tensor | None, dtype: torch.dtype, name: str = ""
) -> PackedLinear:
    """Packs the outputs of all parts, one after another; parts that are stored differently are computed apart.

    `name`: As of `pack`.
    """
    chosen = packing()
    packed = _pack_parts(parts, bias, dtype, chosen)
    if chosen.weights is not None and name:
        chosen.weights.keep(name, packed)
    return packed


def pack_stored(weights: Sequence[AnyStoredWeight], dtype: torch.dtype, device: torch.device) -> PackedExperts | None:
    """Packs the experts of a layer as a checkpoint stores them.

    None where the device has them in one tensor, and its kernels no format that all of them have.
    """
    if not are_one_tensor(device.type):
        return join_experts([pack_parts([weight.to(device)], None, dtype) for weight in weights])
    return pack_stored_experts(weights, dtype, device)


def _pack_parts(
    parts: Sequence[torch.Tensor | AnyStoredWeight], bias: torch.Tensor | None, dtype: torch.dtype, chosen: Packing
) -> PackedLinear:
    is_invariant = chosen.is_batch_invariant
    stored = [part for part in parts if isinstance(part, AnyStoredWeight)]
    joined = join_stored(stored) if len(stored) == len(parts) else None
    if joined is not None:
        return pack_stored_linear(joined, dtype, bias, is_invariant, chosen.input_rounding)
    parts = _joined_neighbours(parts)
    biases = [None] * len(parts) if bias is None else bias.split([part.shape[0] for part in parts])
    return concatenate_linears(
        [
            pack_stored_linear(part, dtype, own_bias, is_invariant, chosen.input_rounding)
            if isinstance(part, AnyStoredWeight)
            else pack_linear(part.clone(), own_bias, None, is_invariant)
            for part, own_bias in zip(parts, biases, strict=True)
        ]
    )


def _joined_neighbours(parts: Sequence[torch.Tensor | AnyStoredWeight]) -> list[torch.Tensor | AnyStoredWeight]:
    """The parts, with neighbours of one storage format joined."""
    found: list[torch.Tensor | AnyStoredWeight] = []
    for part in parts:
        joined = None
        if found and not isinstance(part, torch.Tensor) and not isinstance(found[-1], torch.Tensor):
            joined = join_stored([found[-1], part])
        if joined is not None:
            found[-1] = joined
        else:
            found.append(part)
    return found
