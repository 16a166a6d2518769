"""The largest value of each row and its index: greedy choice."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def argmax(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row and its lowest index (int64), both [num_rows]; NaN counts as the largest.

    `values`: [num_rows, row_size], with a row_size of at least 1.
    """
    if values.ndim != 2 or not values.shape[1]:
        raise ValueError(f"values must be [num_rows, row_size] with something in each row, got {tuple(values.shape)}.")
    found: tuple[torch.Tensor, torch.Tensor] = implementation("argmax", values.device.type).argmax(values)
    return found
