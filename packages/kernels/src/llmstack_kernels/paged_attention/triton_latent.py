"""Latent attention on a GPU: the values of one KV head begin its keys.

A program walks over the context of one token, for some of its query heads. It loads each latent once, for scores and
for sums. So a token's result is bit-equal alone and in any batch, decoded and within a prompt, however that is cut. A
single long context keeps few multiprocessors busy: it is not split.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.paged_attention.inputs import AttentionInputs
from llmstack_kernels.paged_attention.triton_tiles import PER_STEP_POINTERS, nothing_seen, score_factors, softmax_step

_ROWS_AT_ONCE = tl.constexpr(128)
_TILE_HEADS = 16  # what a product of matrices takes at least
_TILE = 32  # latents: 36 KB of 16 bits with 576 numbers each
_NUM_STAGES = 3  # two of them on their way
_MAX_WIDTH = 1024


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=PER_STEP_POINTERS)
def _latent_kernel(
    query,  # [num_tokens, num_heads, RANK + REST]
    cache,  # [num_blocks, 1, BLOCK_SIZE, RANK + REST]
    query_start_loc,  # [num_rows + 1]
    seq_lens,  # [num_rows]
    block_tables,  # [num_rows, ...]
    stored_scale,  # [1], or None
    out,  # [num_tokens, num_heads, RANK]
    scale,
    query_stride,
    block_stride,
    table_stride,
    num_rows,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,  # numbers of a value, with which a key begins
    REST: tl.constexpr,  # numbers of a key behind them
    TILE_HEADS: tl.constexpr,
    TILE: tl.constexpr,
):
    token, heads = tl.program_id(0), tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    row = 0
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = start + tl.arange(0, _ROWS_AT_ONCE)
        ends = tl.load(query_start_loc + rows + 1, mask=rows < num_rows, other=2147483647)
        row += tl.sum((ends <= token).to(tl.int32), 0)
    if row >= num_rows:
        return  # padding
    end = tl.load(seq_lens + row) - tl.load(query_start_loc + row + 1) + token + 1
    wait_for_previous()
    block_table = block_tables + tl.cast(row, tl.int64) * table_stride
    firsts, lasts = tl.arange(0, triton.next_power_of_2(RANK)), tl.arange(0, triton.next_power_of_2(REST))
    is_head = (heads < num_heads)[:, None]
    places = query + token.to(tl.int64) * query_stride + heads[:, None] * (RANK + REST)
    own = tl.load(places + firsts[None, :], mask=is_head & (firsts < RANK)[None, :], other=0.0)
    own_rest = tl.load(places + RANK + lasts[None, :], mask=is_head & (lasts < REST)[None, :], other=0.0)
    _, to_exponent = score_factors(scale, None, None, stored_scale, 0)
    maxima, sums, totals = nothing_seen(TILE_HEADS, RANK)
    for position in range(0, end, TILE):
        positions = position + tl.arange(0, TILE)
        is_seen = positions < end
        blocks = tl.load(block_table + positions // BLOCK_SIZE, mask=is_seen, other=0)
        offsets = blocks.to(tl.int64) * block_stride + positions % BLOCK_SIZE * (RANK + REST)
        latents = cache + offsets[:, None]
        values = tl.load(latents + firsts[None, :], mask=is_seen[:, None] & (firsts < RANK)[None, :], other=0.0)
        rest = tl.load(latents + RANK + lasts[None, :], mask=is_seen[:, None] & (lasts < REST)[None, :], other=0.0)
        values, rest = values.to(own.dtype), rest.to(own.dtype)
        scores = tl.dot(own, tl.trans(values), input_precision="ieee")
        scores = tl.dot(own_rest, tl.trans(rest), scores, input_precision="ieee")
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        maxima, sums, totals = softmax_step(scores, values, maxima, sums, totals, to_exponent)
    result = totals / sums[:, None]
    if stored_scale is not None:
        result = result * tl.load(stored_scale)
    places = out + (token.to(tl.int64) * num_heads + heads[:, None]) * RANK + firsts[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=is_head & (firsts < RANK)[None, :])


def is_latent(inputs: AttentionInputs) -> bool:
    """Whether the values are the first numbers of the keys of one head, and the kernel computes these shapes."""
    keys, values = inputs.key_cache, inputs.value_cache
    is_view = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
    options = (inputs.sliding_window, inputs.soft_cap, inputs.alibi_slopes, inputs.sinks)
    block_size, width = keys.shape[2:]
    is_fitting = not block_size & (block_size - 1) and width <= _MAX_WIDTH and 16 <= values.shape[3] <= width - 16
    return is_view and is_fitting and keys.shape[1] == 1 and all(option is None for option in options)


def attend_latents(inputs: AttentionInputs) -> torch.Tensor:  # [num_tokens, num_heads, value_dim]
    """Decodes and prompts alike.

    Raises:
        ValueError: The memory has another layout.
    """
    query, cache = inputs.query.contiguous(), inputs.key_cache
    num_tokens, num_heads, width = query.shape
    block_size, rank = cache.shape[2], inputs.value_cache.shape[3]
    if cache.stride()[2:] != (width, 1) or inputs.block_tables.stride(1) != 1:
        raise ValueError("Each block and each row of the block tables must be contiguous.")
    out = query.new_empty((num_tokens, num_heads, rank))
    is_wide = query.dtype == torch.float32
    launch(
        _latent_kernel,
        (num_tokens, triton.cdiv(num_heads, _TILE_HEADS)),
        query,
        cache,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.key_scale,
        out,
        inputs.scale,
        query.stride(0),
        cache.stride(0),
        inputs.block_tables.stride(0),
        inputs.seq_lens.shape[0],
        num_heads,
        num_warps=8,
        num_stages=1 if is_wide else _NUM_STAGES,
        launch_pdl=supports_dependent_launch(out.device),
        BLOCK_SIZE=block_size,
        RANK=rank,
        REST=width - rank,
        TILE_HEADS=_TILE_HEADS,
        TILE=_TILE // 2 if is_wide else _TILE,
    )
    return out
