"""Rotation of heads by the row and the column of a patch."""

from __future__ import annotations

import torch


def rotate_queries_and_keys(projected: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values [patches, 3, num_heads, head_dim] with the first two rotated."""
    query, key, value = projected.unbind(1)
    return torch.stack((rotate_heads(query, angles), rotate_heads(key, angles), value), dim=1)


def rotate_heads(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Heads [patches, num_heads, head_dim] rotated by angles [patches, head_dim / 2], in float32.

    The halves of a head are the two numbers of each pair.
    """
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
