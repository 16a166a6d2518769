"""Attention inside a picture, whose tokens see all of it and what is before."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerCache
from llmstack_model_runner.layers.step_vectors import Block


def attend_in_blocks_(
    out: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    query: torch.Tensor,  # the same
    kv_cache: LayerCache,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> None:
    """Replaces the causal attention of the tokens of the step's blocks.

    Keys and values are read from the cache, which has those of the step already. A block's result depends on its
    context alone, since all of its tokens are in one step.
    """
    if metadata.vectors is None:
        return
    for block in metadata.vectors.blocks:
        start = 0 if sliding_window is None else max(0, block.first_position - sliding_window + 1)
        key, value = (
            _context(cache, factor, metadata.block_tables[block.row], start, block.end_position).to(query.dtype)
            for cache, factor in zip(kv_cache, scales, strict=True)
        )
        tokens = slice(block.first_token, block.first_token + block.end_position - block.first_position)
        queries = query[tokens].transpose(0, 1)[None]
        mask = None if sliding_window is None else _window(block, start, sliding_window, query.device)
        attended = F.scaled_dot_product_attention(
            queries, key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[tokens] = attended[0].transpose(0, 1)


def _context(
    cache: torch.Tensor, factor: torch.Tensor | None, table: torch.Tensor, start: int, end: int
) -> torch.Tensor:  # [num_kv_heads, end - start, head_dim]
    """The cached vectors of places [start, end) of a row; earlier blocks may have been freed."""
    block_size = cache.shape[2]
    first = start // block_size
    stored = cache[table[first : -(-end // block_size)].long()].transpose(0, 1).flatten(1, 2)
    own = stored[:, start - first * block_size : end - first * block_size]
    return own if factor is None else own.float() * factor.view(-1, 1, 1)


def _window(block: Block, start: int, sliding_window: int, device: torch.device) -> torch.Tensor:
    """Which places from `start` on each token of a block sees: bool [tokens, places]."""
    tokens = torch.arange(block.first_position, block.end_position, device=device)[:, None]
    return torch.arange(start, block.end_position, device=device) > tokens - sliding_window
