"""Embedding in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(ids: torch.Tensor, table: torch.Tensor, addend: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Look up, multiply, add."""
    rows = F.embedding(ids, table)
    if scale != 1.0:
        rows = rows * scale
    return rows if addend is None else rows + addend
