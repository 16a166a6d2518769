"""Token bitmask in plain PyTorch: one flag per token, and a fill where it is not set."""

from __future__ import annotations

import torch


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Gathers the rows and puts them back."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_barred = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[-1]] == 0
    logits[rows] = logits[rows].masked_fill_(is_barred, -torch.inf)
