"""Paged attention row by row in float32: slow, obvious, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from llmstack_kernels.graph_safety import host_stands_in


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    query_start_loc: torch.Tensor,  # [num_rows + 1] int32
    seq_lens: torch.Tensor,  # [num_rows] int32
    block_tables: torch.Tensor,  # [num_rows, max_blocks_per_row] int32
    scale: float,
    *,
    query_start_loc_list: Sequence[int] | None = None,
    seq_lens_list: Sequence[int] | None = None,
    max_query_len: int | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [num_heads]
    key_scale: torch.Tensor | None = None,  # [num_kv_heads]
    value_scale: torch.Tensor | None = None,  # [num_kv_heads]
    plan: object | None = None,
    decodes_as_prefills: bool = False,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Attend each row over its gathered context; lists that are missing are read from the tensors."""
    out = torch.empty_like(query)
    with host_stands_in():
        starts = query_start_loc.tolist() if query_start_loc_list is None else query_start_loc_list
        lengths = seq_lens.tolist() if seq_lens_list is None else seq_lens_list
        for row, (start, end) in enumerate(pairwise(starts)):
            keys = _context(key_cache, block_tables[row], lengths[row], key_scale)
            values = _context(value_cache, block_tables[row], lengths[row], value_scale)
            out[start:end] = _attend(query[start:end], keys, values, scale, sliding_window, soft_cap, alibi_slopes)
    return out


def _context(
    cache: torch.Tensor,
    block_ids: torch.Tensor,
    seq_len: int,
    stored_scale: torch.Tensor | None,
) -> torch.Tensor:  # [num_kv_heads, seq_len, head_dim]
    _, num_kv_heads, block_size, head_dim = cache.shape
    num_blocks = -(-seq_len // block_size)
    blocks = cache[block_ids[:num_blocks].long()]  # [num_blocks, num_kv_heads, block_size, head_dim]
    context = blocks.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)[:, :seq_len].float()
    return context if stored_scale is None else context * stored_scale[:, None, None]


def _attend(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [num_kv_heads, seq_len, head_dim]
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
) -> torch.Tensor:  # [query_len, num_heads, head_dim]
    query_len, num_heads, _ = query.shape
    num_kv_heads, seq_len, _ = keys.shape
    group = num_heads // num_kv_heads
    scores = query.float().transpose(0, 1) @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(seq_len, device=query.device)
    query_positions = positions[seq_len - query_len :, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes[:, None, None] * (positions - query_positions)
    visible = positions <= query_positions
    if sliding_window is not None:
        visible &= positions > query_positions - sliding_window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).to(query.dtype)
