"""Paged attention row by row in float32: slow, obvious, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch

from llmstack_kernels.graph_safety import host_stands_in
from llmstack_kernels.paged_attention.inputs import AttentionInputs


def paged_attention(inputs: AttentionInputs) -> torch.Tensor:  # [num_tokens, num_heads, value_dim]
    """Attends each row over its gathered context. Missing lists are read from the tensors."""
    out = inputs.query.new_empty((*inputs.query.shape[:2], inputs.value_cache.shape[3]))
    with host_stands_in():
        lists = inputs.query_start_loc_list, inputs.seq_lens_list
        starts = inputs.query_start_loc.tolist() if lists[0] is None else lists[0]
        lengths = inputs.seq_lens.tolist() if lists[1] is None else lists[1]
        for row, (start, end) in enumerate(pairwise(starts)):
            keys = _context(inputs.key_cache, inputs.block_tables[row], lengths[row], inputs.key_scale)
            values = _context(inputs.value_cache, inputs.block_tables[row], lengths[row], inputs.value_scale)
            out[start:end] = _attend(inputs.query[start:end], keys, values, inputs)
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
    values: torch.Tensor,  # [num_kv_heads, seq_len, value_dim]
    inputs: AttentionInputs,
) -> torch.Tensor:  # [query_len, num_heads, value_dim]
    query_len, num_heads, _ = query.shape
    num_kv_heads, seq_len, _ = keys.shape
    group = num_heads // num_kv_heads
    scores = query.float().transpose(0, 1) @ keys.repeat_interleave(group, 0).transpose(1, 2) * inputs.scale
    if inputs.soft_cap is not None:
        scores = inputs.soft_cap * torch.tanh(scores / inputs.soft_cap)
    positions = torch.arange(seq_len, device=query.device)
    query_positions = positions[seq_len - query_len :, None]
    if inputs.alibi_slopes is not None:
        scores = scores + inputs.alibi_slopes[:, None, None] * (positions - query_positions)
    visible = positions <= query_positions
    if inputs.sliding_window is not None:
        visible &= positions > query_positions - inputs.sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    if inputs.sinks is not None:
        scores = torch.cat((scores, inputs.sinks[:, None, None].expand(-1, query_len, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :seq_len]
    return (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).to(query.dtype)
