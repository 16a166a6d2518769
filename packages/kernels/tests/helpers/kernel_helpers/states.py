"""Rows of steps whose layers keep states, and blocks of states that lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.state_rows import StateRows


def make_rows(
    counts: Sequence[int], known: Sequence[int] | None = None, first_block: int = 1, device: str = "cpu"
) -> StateRows:
    """Row i reads block `first_block` + 2 i, and writes the one behind it."""
    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
    sources = torch.arange(len(counts), device=device) * 2 + first_block
    return StateRows(starts, sources, sources + 1, torch.tensor([*(known or counts)], device=device))


def make_states(num_blocks: int, shape: Sequence[int]) -> torch.Tensor:
    """Float32 [num_blocks, *shape] of random numbers; other numbers lie between the blocks."""
    size = torch.Size(shape).numel()
    storage = torch.randn((num_blocks, size + 3), generator=torch.Generator().manual_seed(1))
    return storage[:, 3:].unflatten(1, tuple(shape))
