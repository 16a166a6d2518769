"""Attention of encoders over the rows of a step, packed one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from llmstack_kernels.bidirectional_attention import bidirectional_attention
from llmstack_model_runner.models.transformers_backend.attention import AttentionCall

_BLOCK = 128
"""Queries of a row that share a slice of keys where a layer has a window."""


@dataclass(frozen=True, slots=True)
class RowLayer:
    """A call of attention as the probe observed it.

    Attributes:
        reach: The tokens on either side that a token attends to, besides itself; None for all of its row.
    """

    module: nn.Module
    reach: int | None


class RowAttention:
    """Each token attends to its own row; layers are numbered in the order of their calls."""

    def __init__(self, layers: Sequence[RowLayer]) -> None:
        self._layers = list(layers)
        self._next = 0
        self._starts: list[int] = []

    def begin(self, starts: list[int]) -> None:
        """Starts a step with the first token of each row, and the end; all calls up to the next one belong to it."""
        self._starts = starts
        self._next = 0

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer = self._layers[self._next]
        if layer.module is not call.module or call.mask is not None:
            raise RuntimeError("the model calls its attention in another way than before")
        self._next += 1
        num_sharing = call.query.shape[1] // call.key.shape[1]
        key, value = (x if num_sharing == 1 else x.repeat_interleave(num_sharing, 1) for x in (call.key, call.value))
        if layer.reach is None or max(end - start for start, end in pairwise(self._starts)) <= layer.reach + 1:
            return bidirectional_attention(call.query, key, value, self._starts, call.scale)
        out = torch.empty_like(call.query)
        for start, end in pairwise(self._starts):
            row = slice(start, end)
            out[row] = windowed_attention(call.query[row], key[row], value[row], call.scale, layer.reach)
        return out


def windowed_attention(
    query: torch.Tensor,  # [length, num_heads, head_dim]
    key: torch.Tensor,  # [length, num_heads, head_dim]
    value: torch.Tensor,  # [length, num_heads, head_dim]
    scale: float,
    reach: int,
) -> torch.Tensor:  # [length, num_heads, head_dim]
    """Attention of one row in which a token sees those at most `reach` away: O(length * reach) time and memory."""
    length = len(query)
    if length <= reach + 1:
        return bidirectional_attention(query, key, value, [0, length], scale)
    num_blocks = -(-length // _BLOCK)
    behind = num_blocks * _BLOCK - length
    queries = F.pad(query, (0, 0, 0, 0, 0, behind)).unflatten(0, (num_blocks, _BLOCK)).transpose(1, 2)
    width = _BLOCK + 2 * reach
    keys, values = (
        F.pad(x, (0, 0, 0, 0, reach, reach + behind)).unfold(0, width, _BLOCK).permute(0, 1, 3, 2) for x in (key, value)
    )
    place = torch.arange(num_blocks * _BLOCK, device=query.device).view(num_blocks, _BLOCK, 1)
    other = (torch.arange(width, device=query.device) - reach) + place[:, :1]  # [num_blocks, 1, width]
    is_seen = ((other - place).abs() <= reach) & (other >= 0) & ((other < length) | (place >= length))
    attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen[:, None], scale=scale)
    return attended.transpose(1, 2).flatten(0, 1)[:length]
