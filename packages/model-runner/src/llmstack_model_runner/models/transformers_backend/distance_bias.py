"""Attention over paged KV storage whose scores have a bias by distance, as in T5."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from llmstack_model_runner.layers.attention_metadata import AttentionMetadata


def attend_with_bias(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    scale: float,
    cache: tuple[torch.Tensor, torch.Tensor],  # [num_blocks, num_kv_heads, block_size, head_dim] each
    scales: tuple[torch.Tensor | None, torch.Tensor | None],  # [num_kv_heads] each
    metadata: AttentionMetadata,
    bias: torch.Tensor,  # [num_heads, num_positions]
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Attention of each token to itself and those before it in its row, one row after the other.

    `bias`: What is added to the score of a key so many tokens back.
    """
    starts = metadata.query_start_loc_list or metadata.query_start_loc.tolist()
    lengths = metadata.seq_lens_list or metadata.seq_lens.tolist()
    attended = torch.empty_like(query)
    for (start, end), length, blocks in zip(pairwise(starts), lengths, metadata.block_tables, strict=True):
        keys, values = (
            _of_row(storage, one, blocks, length, query.dtype) for storage, one in zip(cache, scales, strict=True)
        )
        back = torch.arange(length - (end - start), length, device=query.device)[:, None] - torch.arange(
            length, device=query.device
        )
        mask = bias[:, back.clamp(min=0)].masked_fill(back < 0, -torch.inf)
        heads = F.scaled_dot_product_attention(query[start:end].transpose(0, 1), keys, values, mask, scale=scale)
        attended[start:end] = heads.transpose(0, 1)
    return attended


def _of_row(
    storage: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, length: int, dtype: torch.dtype
) -> torch.Tensor:  # [num_kv_heads, length, head_dim]
    """A row's keys, or its values, in the type of its queries."""
    count = -(-length // storage.shape[2])
    states = storage[blocks[:count].long()].transpose(0, 1).flatten(1, 2)[:, :length]
    return states.to(dtype) if scale is None else (states.float() * scale[:, None, None]).to(dtype)
