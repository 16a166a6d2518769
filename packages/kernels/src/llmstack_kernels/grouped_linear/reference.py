"""Linear layers of experts, one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.grouped_linear.row_groups import RowGroups
from llmstack_kernels.linear import GATED_ACTIVATIONS, PackedLinear, pack_linear

__all__ = ["IS_ONE_TENSOR", "ExpertByExpert", "group_rows", "pack_experts", "sum_choices"]

IS_ONE_TENSOR = False


class ExpertByExpert:
    """A packed linear layer per expert."""

    __slots__ = ("_experts",)

    def __init__(self, experts: Sequence[PackedLinear]) -> None:
        self._experts = experts

    @property
    def layers(self) -> Sequence[PackedLinear]:
        """A layer per expert."""
        return self._experts

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return len(self._experts)

    @property
    def in_features(self) -> int:
        """Length of an input row."""
        return self._experts[0].in_features

    @property
    def out_features(self) -> int:
        """Length of an output row before a gate halves it."""
        return self._experts[0].out_features

    def __call__(self, x: torch.Tensor, groups: RowGroups, activation: str = "none") -> torch.Tensor:
        """[num_rows, out_features]; experts without rows are not computed, which the host looks up."""
        width = self.out_features // 2 if activation in GATED_ACTIVATIONS else self.out_features
        out = x.new_empty((groups.num_rows, width))
        rows_per_input = groups.num_rows // x.shape[0] if x.shape[0] else 1
        starts = groups.starts.tolist()
        for expert, start, end in zip(self._experts, starts, starts[1:], strict=False):
            if start < end:
                rows = groups.rows[start:end]
                out[rows] = expert(x[rows // rows_per_input], activation)
        return out


def pack_experts(
    weights: torch.Tensor, quantization: str | None = None, is_batch_invariant: bool = False
) -> ExpertByExpert:
    """Pack each expert's weight by itself."""
    return ExpertByExpert([pack_linear(weight, None, quantization, is_batch_invariant) for weight in weights])


def group_rows(expert_ids: torch.Tensor, num_experts: int) -> RowGroups:
    """Sort rows by expert, equal ones as they stood."""
    num_tokens, num_choices = expert_ids.shape
    sorted_ids, rows = torch.sort(expert_ids.reshape(-1), stable=True)
    bounds = torch.arange(num_experts + 1, dtype=sorted_ids.dtype, device=sorted_ids.device)
    starts = torch.searchsorted(sorted_ids, bounds).int()
    return RowGroups(rows, starts, num_tokens, num_choices)


def sum_choices(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """One choice after the other, so that the order of the sum is plain."""
    num_tokens, num_choices = shares.shape
    choices = rows.view(num_tokens, num_choices, rows.shape[1]).float()
    total = choices[:, 0] * shares[:, :1]
    for choice in range(1, num_choices):
        total = total + choices[:, choice] * shares[:, choice : choice + 1]
    return total.to(rows.dtype)
