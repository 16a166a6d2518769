"""ALiBi: positions as a slope times the distance, another for each head (arXiv 2108.12409)."""

from __future__ import annotations

import torch


def alibi_slopes(num_heads: int) -> torch.Tensor:  # [num_heads] float32
    """Powers of one base; heads past the largest power of two take every other slope of twice as many heads."""
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2.0 ** (-4 * (2 * head + 1) / whole) for head in range(num_heads - whole)]
    return torch.tensor(slopes)
