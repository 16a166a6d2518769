"""Low-rank updates (LoRA) of linear layers; each row may use another adapter.

An adapter gives a layer a pair of small factors A and B, and the outputs of its rows become y + (x Aᵀ) B. Rows are
sorted by adapter once per step (`LowRankSlots.group`), and every layer uses that order. A row's result depends neither
on the rows beside it nor on their adapters, bit by bit.
Rows of experts (`ExpertRows`) are sorted by adapter and expert.
"""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.low_rank.row_order import Send
from llmstack_kernels.low_rank.slots import MAX_PARTS, ExpertRows, LowRankAdapter, LowRankFactors, LowRankSlots

__all__ = [
    "MAX_PARTS",
    "ExpertRows",
    "LowRankAdapter",
    "LowRankFactors",
    "LowRankSlots",
    "Send",
    "activate_rounded",
    "add_low_rank_",
    "add_low_rank_to_embedding_",
]


def add_low_rank_(y: torch.Tensor, x: torch.Tensor, slots: LowRankSlots | ExpertRows, layer: int) -> None:
    """Adds the updates of the grouped rows to `y`; all other rows stay as they are, bit by bit.

    Args:
        y: [num_rows, out_features], contiguous, float32 or in the type of `x`.
        x: [num_rows, in_features] in the type of the factors; its rows may lie apart.
        slots: Adapters, and the rows of the step; or those of a layer of experts.
        layer: Number of the layer in the adapters; with experts that of the first one.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[0] != y.shape[0] or not y.is_contiguous():
        raise ValueError(f"outputs of shape {tuple(y.shape)} do not fit inputs of shape {tuple(x.shape)}.")
    if y.dtype not in (torch.float32, x.dtype):
        raise ValueError(f"outputs must be float32 or {x.dtype}, got {y.dtype}.")
    implementation("low_rank", x.device.type).add_low_rank_(y, x, slots, layer)


def add_low_rank_to_embedding_(
    y: torch.Tensor, ids: torch.Tensor, slots: LowRankSlots, layer: int, num_ids: int
) -> None:
    """Adds the updates of an embedding to the vectors of the grouped rows: that of the id `i` is A[:, i] B.

    Args:
        y: [num_rows, size], contiguous, in the type of the factors.
        ids: int64 [num_rows], contiguous, each less than `num_ids`: native code does not check them.
        slots: Adapters, and the rows of the step.
        layer: Number of the layer in the adapters.
        num_ids: Columns of the first factors.
    """
    if y.ndim != 2 or ids.shape != y.shape[:1] or not (y.is_contiguous() and ids.is_contiguous()):
        raise ValueError(f"vectors of shape {tuple(y.shape)} do not fit ids of shape {tuple(ids.shape)}.")
    implementation("low_rank", y.device.type).add_low_rank_to_embedding_(y, ids, slots, layer, num_ids)


def activate_rounded(x: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """activation(x), rounded once to `dtype`, as the epilogue of a linear layer computes it.

    Args:
        x: float32 [num_rows, size], contiguous.
        activation: One of `linear.ACTIVATIONS`.
        dtype: The type of the result.
    """
    out: torch.Tensor = implementation("low_rank", x.device.type).activate_rounded(x, activation, dtype)
    return out
