"""Low-rank updates by PyTorch, a tile of rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from llmstack_kernels import reference
from llmstack_kernels.low_rank.slots import ExpertRows, LowRankSlots


def add_low_rank_(y: torch.Tensor, x: torch.Tensor, slots: LowRankSlots | ExpertRows, layer: int) -> None:
    """Sums in float32, over the inputs row by row and over the rank in ascending order."""
    # Not a matrix product, whose order of sums depends on the number of rows.
    _update(y, slots, layer, lambda rows, a: (x[rows].float()[:, None, :] * a.float()).sum(-1))


def add_low_rank_to_embedding_(
    y: torch.Tensor, ids: torch.Tensor, slots: LowRankSlots, layer: int, num_ids: int
) -> None:
    """Sums in float32, over the rank in ascending order."""
    _update(y, slots, layer, lambda rows, a: a.t()[ids[rows]].float())


def _update(
    y: torch.Tensor,
    slots: LowRankSlots | ExpertRows,
    layer: int,
    reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """`reduce`: from rows and a first factor to [number of rows, rank]."""
    for slot, first, count in slots.host_tiles:
        rows = torch.tensor(slots.host_rows[first : first + count], device=y.device)
        for a, b, first_output in slots.factors(slot, layer):
            reduced = reduce(rows, a)
            update = torch.zeros((count, b.shape[1]), dtype=torch.float32, device=y.device)
            for rank, factors in enumerate(b.float()):
                update += reduced[:, rank : rank + 1] * factors
            columns = slice(first_output, first_output + b.shape[1])
            y[rows, columns] = (y[rows, columns].float() + update).to(y.dtype)


def activate_rounded(x: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """The activation in float32, then the rounding."""
    if activation == "silu":
        return torch.nn.functional.silu(x).to(dtype)
    activated: torch.Tensor = x if activation == "none" else getattr(reference, activation)(x)
    return activated.to(dtype)
