"""Attention over keys and values that lie in blocks: any mix of prefill chunks and decodes in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.float8_cache import check_scales


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
    alibi_slopes: torch.Tensor | None = None,  # [num_heads] float32
    key_scale: torch.Tensor | None = None,  # [num_kv_heads] float32
    value_scale: torch.Tensor | None = None,  # [num_kv_heads] float32
    plan: object | None = None,
    decodes_as_prefills: bool = False,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Softmax attention of each token over its row's context up to itself.

    Row i owns tokens [query_start_loc[i], query_start_loc[i + 1]), the last ones of its context of seq_lens[i] tokens,
    whose keys and values (this step's included) lie in the blocks of `block_tables[i]`. With `num_heads` a multiple of
    `num_kv_heads`, neighbouring query heads share a KV head. With a sliding window a token sees itself and the
    `sliding_window - 1` tokens before it. `plan` is what `plan_paged_attention` made for the same rows.

    A score is `scale` * q·k; then, given a soft cap, soft_cap * tanh(score / soft_cap); then, given ALiBi's slopes,
    plus slope * (position of the key - position of the query).

    The lists hold what the tensors of the same names do, so that a CPU need not convert them. On a GPU both may be left
    out: then `max_query_len`, which no row may exceed, says what kernels are started (1: every row is a decode).
    `decodes_as_prefills` gives a row of one token the bits that the token has within a prompt, where there are kernels
    for each; long contexts then take more time.
    With caches of float8_e4m3fn a stored number times its head's `key_scale` or `value_scale` is the key or value.
    """
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
    _check_rows(query.shape[0], query_start_loc_list, seq_lens_list, max_query_len)
    check_scales(key_cache, key_scale, value_scale)
    if alibi_slopes is not None and alibi_slopes.shape != (num_heads,):
        raise ValueError(f"alibi_slopes of shape {tuple(alibi_slopes.shape)} do not fit {num_heads} query heads.")
    out: torch.Tensor = implementation("paged_attention", query.device.type).paged_attention(
        query,
        key_cache,
        value_cache,
        query_start_loc,
        seq_lens,
        block_tables,
        scale,
        query_start_loc_list=query_start_loc_list,
        seq_lens_list=seq_lens_list,
        max_query_len=max_query_len,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
        key_scale=key_scale,
        value_scale=value_scale,
        plan=plan,
        decodes_as_prefills=decodes_as_prefills,
    )
    return out


def _check_rows(
    num_tokens: int, starts: Sequence[int] | None, seq_lens: Sequence[int] | None, max_query_len: int | None
) -> None:
    if starts is None or seq_lens is None:
        if starts is not None or seq_lens is not None:
            raise ValueError("query_start_loc_list and seq_lens_list go together.")
        if max_query_len is None:
            raise ValueError("max_query_len must be given where query_start_loc_list and seq_lens_list are not.")
    elif len(starts) != len(seq_lens) + 1 or starts[-1] != num_tokens:
        raise ValueError(f"query_start_loc does not divide {num_tokens} tokens into {len(seq_lens)} rows.")


def plan_paged_attention(
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    block_tables: torch.Tensor,  # [num_rows, max_blocks_per_row] int32
    *,
    query_start_loc_list: Sequence[int] | None = None,
    seq_lens_list: Sequence[int] | None = None,
    sliding_window: int | None = None,
) -> object | None:
    """Work that depends on the rows only, to be done once per step and passed to every layer; None where there is none.

    The plan holds for all layers whose caches have the shape of `key_cache` and which use the same sliding window.
    The lists may be left out on a GPU, where nothing is planned.
    """
    module = implementation("paged_attention", key_cache.device.type)
    if not hasattr(module, "make_plan"):
        return None
    plan: object = module.make_plan(key_cache, block_tables, query_start_loc_list, seq_lens_list, sliding_window)
    return plan
