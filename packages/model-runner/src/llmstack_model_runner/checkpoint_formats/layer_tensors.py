"""The tensors of one quantized layer, and checks that its readers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from llmstack_kernels.linear import AnyStoredWeight, StoredWeight


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors of a layer by their suffixes, such as `qweight`; each is read when it is asked for."""

    suffixes: frozenset[str]
    read: Callable[[str], torch.Tensor]

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.suffixes

    def get(self, suffix: str, *dtypes: torch.dtype) -> torch.Tensor:
        """A tensor of one of the types; ValueError if it is missing or of another type."""
        if suffix not in self.suffixes:
            raise ValueError(f"{suffix} is missing.")
        tensor = self.read(suffix)
        if tensor.dtype not in dtypes:
            raise ValueError(f"{suffix} has the type {str(tensor.dtype).removeprefix('torch.')}.")
        return tensor

    def get_scales(self, suffix: str) -> torch.Tensor:
        """Scales in a floating type of 16 or 32 bits."""
        return self.get(suffix, torch.float32, torch.bfloat16, torch.float16)

    def check_finite(self, *suffixes: str) -> None:
        """Checks scales of activations, which are not used: inputs are not rounded."""
        for suffix in suffixes:
            if suffix in self.suffixes and not self.read(suffix).float().isfinite().all():
                raise ValueError(f"{suffix} is NaN or infinite.")


@dataclass(frozen=True, slots=True)
class UnreadWeight:
    """A weight of a quantized checkpoint, which is reduced to a layout only where it is needed.

    Attributes:
        read: Reads it; ValueError if it is damaged.
        is_table: Rows of it are looked up, so the model widens it to its own type.
    """

    read: Callable[[], torch.Tensor | AnyStoredWeight]
    is_table: bool = False


class Reader(Protocol):
    """Reduces the tensors of a layer to a weight.

    Attributes:
        markers: Suffixes of which a quantized layer has one.
        suffixes: Suffixes of all tensors that a quantized layer may have.
    """

    @property
    def markers(self) -> frozenset[str]: ...

    @property
    def suffixes(self) -> frozenset[str]: ...

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        """The weight; ValueError with what is wrong with the tensors."""


def require_shape(suffix: str, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """The tensor, if it has the shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{suffix} has the shape {list(tensor.shape)} instead of {list(shape)}.")
    return tensor


def require_matrix(suffix: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a matrix that is not empty."""
    if tensor.ndim != 2 or not tensor.numel():
        raise ValueError(f"{suffix} has the shape {list(tensor.shape)}, which is no matrix.")
    return tensor.shape[0], tensor.shape[1]


def unpack_last(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Numbers packed into words of int32 along the last dimension, the first in the lowest bits: uint8."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)
    return numbers.to(torch.uint8).flatten(-2)


def split_bytes(packed: torch.Tensor, *, is_low_first: bool) -> torch.Tensor:
    """Two numbers of four bits from each byte, along the last dimension."""
    low, high = packed & 15, packed >> 4
    return torch.stack((low, high) if is_low_first else (high, low), -1).flatten(-2)


def group_size_of(num_inputs: int, num_groups: int, group_size: int | None) -> int:
    """Inputs per group of so many groups, which the configuration may name; ValueError if they do not fit."""
    if num_groups == 1 and (group_size is None or group_size == -1 or group_size >= num_inputs):
        return num_inputs
    size = -(-num_inputs // num_groups) if group_size is None or group_size == -1 else group_size
    if -(-num_inputs // size) != num_groups:
        raise ValueError(f"{num_groups} groups of {size} do not fit {num_inputs} inputs.")
    return size


def runs_of_groups(group_ids: torch.Tensor, num_inputs: int, group_size: int) -> torch.Tensor | None:
    """The order that makes the groups runs of inputs; None where they are runs already.

    ValueError unless every group has `group_size` inputs, and the last the rest.
    """
    require_shape("g_idx", group_ids, num_inputs)
    runs = torch.arange(num_inputs) // group_size
    if torch.equal(group_ids.long(), runs):
        return None
    order = torch.argsort(group_ids.long(), stable=True)
    if not torch.equal(group_ids.long()[order], runs):
        raise ValueError(f"g_idx does not give each group {group_size} inputs.")
    return order
