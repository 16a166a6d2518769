"""Prefill attention on a GPU: prompts, chunks of them, and drafts to verify.

A program computes a tile of queries of one KV head: neighbouring tokens, each with all query heads that share it. It
walks over the keys from the first that any of them sees: with a mask where some do not see all, without it between.
Tiles of keys begin at multiples of their size, so a token's result does not depend on how its prompt is cut in chunks.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.paged_attention.triton_operands import Operands
from llmstack_kernels.paged_attention.triton_tiles import (
    PER_STEP_POINTERS,
    attend,
    load_queries,
    score_factors,
    sinks_seen,
    store_heads,
)


@triton.jit
def _find_row(tile, query_start_loc, num_rows, TOKENS: tl.constexpr):
    """The row of a tile, by bisection: that of the last row whose first tile is not after it.

    A row begins at tile `begin // TOKENS + row`: then each row has enough tiles, independently of the rows before it.
    """
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle)
    return low


@triton.jit
def _spans(first, last, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """For queries at positions `first` to `last`: the first key seen, and where masked, full and masked tiles begin."""
    low, full_start = 0, 0
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0)
        full_start = tl.cdiv(tl.maximum(last - WINDOW + 1, 0), TILE) * TILE
    start = low // TILE * TILE
    full_end = (first + 1) // TILE * TILE
    return low, start, tl.minimum(full_start, full_end), full_end


@triton.jit(do_not_specialize=["num_rows", "table_stride"], do_not_specialize_on_alignment=PER_STEP_POINTERS)
def _prefill_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache,  # likewise
    query_start_loc,  # [num_rows + 1]
    seq_lens,  # [num_rows]
    block_tables,  # [num_rows, ...]
    alibi_slopes,  # [num_heads], or None
    sinks,  # [num_heads], or None
    key_scale,  # [num_kv_heads], or None
    value_scale,  # [num_kv_heads], or None
    out,  # [num_tokens, num_heads, HEAD_DIM]
    scale,
    soft_cap,
    query_stride,
    block_stride,
    table_stride,
    num_rows,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    ROWS: tl.constexpr,  # of a tile of queries
    TILE: tl.constexpr,  # of keys
    WINDOW: tl.constexpr,  # 0: none
    LEFT_OUT: tl.constexpr,  # length of rows that other kernels compute: 1, or 0 for none
):
    wait_for_previous()
    unit = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prompt have the most keys, and begin first
    tile, kv_head = unit // num_kv_heads, unit % num_kv_heads
    row = _find_row(tile, query_start_loc, num_rows, ROWS // GROUP)
    begin = tl.load(query_start_loc + row)
    query_len = tl.load(query_start_loc + row + 1) - begin
    first_token = (tile - (begin // (ROWS // GROUP) + row)) * (ROWS // GROUP)
    if (first_token >= query_len) | (query_len == LEFT_OUT):
        return  # past the row; or a decode, which the other kernels compute
    members = tl.arange(0, ROWS)
    tokens, heads = first_token + members // GROUP, kv_head * GROUP + members % GROUP
    is_inside = (members // GROUP < ROWS // GROUP) & (tokens < query_len)
    position = tl.load(seq_lens + row) - query_len  # of the chunk's first token
    own = load_queries(query, begin + tokens, heads, is_inside, query_stride, HEAD_DIM, key_scale is not None)
    # Queries beyond the last stand where it stands: they see keys, so that nothing is divided by 0.
    positions = position + tl.minimum(tokens, query_len - 1)
    queries = own, positions, heads
    caches = key_cache, value_cache, block_tables + row.to(tl.int64) * table_stride, block_stride, kv_head
    factor, to_exponent = score_factors(scale, soft_cap, alibi_slopes, key_scale, kv_head)
    scoring = factor, to_exponent, soft_cap, alibi_slopes
    end = position + tl.minimum(first_token + ROWS // GROUP, query_len)
    low, start, full_start, full_end = _spans(position + first_token, end - 1, TILE, WINDOW)
    softmax = sinks_seen(sinks, heads, to_exponent, ROWS, HEAD_DIM)
    if WINDOW > 0:
        span = low, start, full_start
        softmax = attend(softmax, queries, caches, span, scoring, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, True, False)
    span, rest = (low, full_start, full_end), (low, full_end, end)
    softmax = attend(softmax, queries, caches, span, scoring, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, False, False)
    _, sums, totals = attend(softmax, queries, caches, rest, scoring, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, True, False)
    result = totals / sums[:, None]
    if value_scale is not None:
        result = result * tl.load(value_scale + kv_head)
    store_heads(out, (begin + tokens).to(tl.int64) * (num_kv_heads * GROUP) + heads, is_inside, result, HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes for a head; they decide the order of sums, so nothing of a batch goes into them.

    Attributes:
        num_rows: Rows of a tile of queries: tokens times heads.
        num_keys: Keys of a tile.
        num_warps: Per program.
        num_stages: Stages of the pipeline; a tile on its way takes two, one for its place in the block table.
    """

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


# Head size, padded, up to which a choice holds. From 64 rows on, an H100 multiplies with whole groups of warps.
# Up to 64, a stage less leaves room for two programs on a multiprocessor: one multiplies while the other exponentiates.
# Up to 256, one leaves room on GPUs whose blocks have 99 KB of shared memory (compute capability 8.6, 8.9 and 12.0).
_TILES = {64: Tiles(128, 64, 8, 4), 128: Tiles(128, 64, 8, 5), 256: Tiles(64, 32, 8, 4)}
_WIDE_TILES = {64: Tiles(64, 32, 8, 5), 128: Tiles(32, 16, 8, 3), 256: Tiles(32, 16, 8, 3)}  # float32


def choose_tiles(operands: Operands) -> Tiles:
    """Tile sizes for a layer; a token's query heads of one KV head always fit."""
    table = _WIDE_TILES if operands.is_wide else _TILES
    tiles = next(tiles for head_dim, tiles in table.items() if operands.padded_dim <= head_dim)
    num_rows = max(tiles.num_rows, triton.next_power_of_2(operands.group))
    # Without tensor cores a tile that so many heads make high takes the registers of more warps.
    num_warps = 16 if operands.is_wide and num_rows > 64 else tiles.num_warps
    return replace(tiles, num_rows=num_rows, num_warps=num_warps)


def attend_prefills(operands: Operands, *, has_decodes: bool = False) -> None:
    """Fill the result for all rows but those of one token; with `has_decodes` for these too."""
    tiles = choose_tiles(operands)
    num_tiles = operands.inputs.query.shape[0] // (tiles.num_rows // operands.group) + operands.num_rows
    launch(
        _prefill_kernel,
        (num_tiles * operands.num_kv_heads,),
        operands.inputs.query,
        operands.inputs.key_cache,
        operands.inputs.value_cache,
        operands.inputs.query_start_loc,
        operands.inputs.seq_lens,
        operands.inputs.block_tables,
        operands.inputs.alibi_slopes,
        operands.inputs.sinks,
        operands.inputs.key_scale,
        operands.inputs.value_scale,
        operands.out,
        operands.inputs.scale,
        operands.inputs.soft_cap,
        operands.inputs.query.stride(0),
        operands.inputs.key_cache.stride(0),
        operands.inputs.block_tables.stride(0),
        operands.num_rows,
        operands.num_kv_heads,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=supports_dependent_launch(operands.out.device),
        BLOCK_SIZE=operands.block_size,
        HEAD_DIM=operands.head_dim,
        GROUP=operands.group,
        ROWS=tiles.num_rows,
        TILE=tiles.num_keys,
        WINDOW=operands.inputs.sliding_window or 0,
        LEFT_OUT=0 if has_decodes else 1,
    )
