"""Row orders of heads for RoPE: neighbouring pairs, or halves."""

from __future__ import annotations

import torch


def halves_of_heads(num_rows: int, num_heads: int, name: str) -> torch.Tensor:
    """For each row in the order of halves that are rotated together, its number in the order of pairs.

    Raises:
        ValueError: The rows are no heads.
    """
    head_dim = num_rows // num_heads if num_heads else 0
    if not head_dim or num_rows % num_heads or head_dim % 2:
        raise ValueError(f"{name[:128]} has {num_rows} rows, which are no {num_heads} heads.")
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)
