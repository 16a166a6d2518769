"""Linear layers of experts: each row uses the weight of its chosen expert.

A token is sent to several experts, so it has several *choices*; rows are numbered token by token, choice by choice.
One layer of experts is: `group_rows` once, `grouped_linear` for each of its products, `sum_choices` at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.grouped_linear.reference import ExpertByExpert
from llmstack_kernels.grouped_linear.row_groups import RowGroups
from llmstack_kernels.linear import ACTIVATIONS, GATED_ACTIVATIONS, AnyStoredWeight, PackedLinear

__all__ = [
    "PackedExperts",
    "RowGroups",
    "are_one_tensor",
    "expert_layers",
    "group_rows",
    "grouped_linear",
    "join_experts",
    "pack_experts",
    "pack_stored_experts",
    "sum_choices",
]


class PackedExperts(Protocol):
    """The weights of all experts, ready to be applied."""

    @property
    def num_experts(self) -> int:
        """The number of experts."""

    @property
    def in_features(self) -> int:
        """Length of an input row."""

    @property
    def out_features(self) -> int:
        """Length of an output row before a gate halves it."""

    def __call__(self, x: torch.Tensor, groups: RowGroups, activation: str = "none") -> torch.Tensor:
        """[num_rows, out_features], see `grouped_linear`."""


def pack_experts(
    weights: torch.Tensor, quantization: str | None = None, is_batch_invariant: bool = False
) -> PackedExperts:
    """Pack weights [num_experts, out_features, in_features]; the options are those of `linear.pack_linear`."""
    if weights.ndim != 3:
        raise ValueError(f"weights must be [num_experts, out_features, in_features], got {tuple(weights.shape)}.")
    module = implementation("grouped_linear", weights.device.type)
    packed: PackedExperts = module.pack_experts(weights, quantization, is_batch_invariant)
    return packed


def pack_stored_experts(
    weights: Sequence[AnyStoredWeight], dtype: torch.dtype, device: torch.device
) -> PackedExperts | None:
    """Pack weights of a quantized checkpoint, an expert's each, for inputs of `dtype`, where experts are one tensor.

    None where no format of the kernels has all of these weights.
    """
    module = implementation("grouped_linear", device.type)
    packed: PackedExperts | None = module.pack_stored_experts(weights, dtype, device)
    return packed


def are_one_tensor(device_type: str) -> bool:
    """Whether the experts of a layer are packed together, and have one format."""
    return bool(implementation("grouped_linear", device_type).IS_ONE_TENSOR)


def join_experts(experts: Sequence[PackedLinear]) -> PackedExperts:
    """Experts that are packed already, each by itself; they are computed in turn."""
    return ExpertByExpert(experts)


def expert_layers(experts: PackedExperts) -> Sequence[PackedLinear] | None:
    """The layers that `join_experts` makes the same of; None where the experts are packed together."""
    return experts.layers if isinstance(experts, ExpertByExpert) else None


def group_rows(expert_ids: torch.Tensor, num_experts: int) -> RowGroups:
    """Which rows each expert has.

    Args:
        expert_ids: [num_tokens, num_choices], from 0 to num_experts - 1; num_experts for rows that are not computed.
        num_experts: Experts of the layer.
    """
    if expert_ids.ndim != 2:
        raise ValueError(f"expert_ids must be [num_tokens, num_choices], got {tuple(expert_ids.shape)}.")
    groups: RowGroups = implementation("grouped_linear", expert_ids.device.type).group_rows(expert_ids, num_experts)
    return groups


def grouped_linear(
    x: torch.Tensor, experts: PackedExperts, groups: RowGroups, activation: str = "none"
) -> torch.Tensor:
    """activation(x Wᵀ), each row with its expert's W: [num_rows, out_features].

    Args:
        x: [num_tokens, in_features], each token for all of its choices, or [num_rows, in_features].
        experts: Packed weights.
        groups: Groups of rows for as many experts.
        activation: One of `linear.ACTIVATIONS`, or of `GATED_ACTIVATIONS`, which halve the output.
    """
    if x.ndim != 2 or x.shape[1] != experts.in_features:
        raise ValueError(f"x of shape {tuple(x.shape)} does not fit experts of {experts.in_features} inputs.")
    if x.shape[0] not in (groups.num_tokens, groups.num_rows):
        raise ValueError(f"x has {x.shape[0]} rows for {groups.num_tokens} tokens of {groups.num_choices} choices.")
    if groups.num_experts != experts.num_experts:
        raise ValueError(f"rows are grouped for {groups.num_experts} experts, and there are {experts.num_experts}.")
    if activation not in ACTIVATIONS and activation not in GATED_ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown.")
    return experts(x, groups, activation)


def sum_choices(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows by their shares, choice after choice in float32: [num_tokens, size].

    Args:
        rows: [num_tokens * num_choices, size].
        shares: float32 [num_tokens, num_choices]; on a GPU, rows with the share 0 are not read.
    """
    if shares.ndim != 2 or rows.shape[0] != shares.numel():
        raise ValueError(f"{rows.shape[0]} rows do not fit shares of shape {tuple(shares.shape)}.")
    summed: torch.Tensor = implementation("grouped_linear", rows.device.type).sum_choices(rows, shares)
    return summed
