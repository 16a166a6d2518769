"""Attention over a paged KV cache: prefill chunks and decodes in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.paged_attention.inputs import AttentionInputs

__all__ = ["AttentionInputs", "paged_attention", "plan_paged_attention"]


def paged_attention(inputs: AttentionInputs) -> torch.Tensor:  # [num_tokens, num_heads, value_dim]
    """Softmax attention of each token over its row's context up to itself.

    Raises:
        ValueError: The inputs do not fit together.
    """
    inputs.check()
    module = implementation("paged_attention", inputs.query.device.type)
    out: torch.Tensor = module.paged_attention(inputs)
    return out


def plan_paged_attention(
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_tables: torch.Tensor,  # [num_rows, max_blocks_per_row] int32
    *,
    query_start_loc_list: Sequence[int] | None = None,
    seq_lens_list: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> object | None:
    """Work that depends on the rows alone: done once per step, passed to every layer. None if there is none.

    The plan holds for all layers whose caches have the shape of `key_cache` and which use the same sliding window.
    The lists are optional on a GPU, where nothing is planned.
    """
    module = implementation("paged_attention", key_cache.device.type)
    if not hasattr(module, "make_plan"):
        return None
    plan: object = module.make_plan(key_cache, block_tables, query_start_loc_list, seq_lens_list, sliding_window)
    return plan
