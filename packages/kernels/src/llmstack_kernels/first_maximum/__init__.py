"""The largest value of each row and where it is: greedy choice."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation


def first_maximum(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each row, NaN if there is any, and the lowest index that has it (int64); both [num_rows].

    `values`: [num_rows, row_size]; rows are not empty.
    """
    if values.ndim != 2 or not values.shape[1]:
        raise ValueError(f"values must be [num_rows, row_size] with something in each row, got {tuple(values.shape)}.")
    found: tuple[torch.Tensor, torch.Tensor] = implementation("first_maximum", values.device.type).first_maximum(values)
    return found
