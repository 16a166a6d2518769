"""Decode attention on a GPU: splits of the context in parallel, then combined.

How a row is cut depends on its own length and the layer's shape alone, so its result is bit-equal in any batch. The
splits of all rows stand in one list, which every program reads off the lengths; so a long row among short ones is
spread over the whole GPU, and no program is started for a split that is not there. (A grid of rows by the most splits
that a context can have would start thousands of those, each for about a microsecond.)
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.paged_attention.triton_operands import Operands
from llmstack_kernels.paged_attention.triton_tiles import (
    PER_STEP_POINTERS,
    attend,
    load_queries,
    nothing_seen,
    score_factors,
    store_heads,
)

# Programs of the first kernel: 31 for each multiprocessor of an H200, of which few run at once. The rest start as those
# end, which levels out splits of different length.
_MAX_PROGRAMS = 4096
# Three tiles of keys and values on their way: each takes two stages, since its place is loaded from the block table.
_NUM_STAGES = 7
# Two of them where tiles that are widened from 8 bits are wide or masked, for which registers would not suffice, and
# where wide ones are of float32, for which the 99 KB of shared memory of compute capability 8.9 would not.
_NUM_STAGES_OF_WIDE = 5
_ROWS_AT_ONCE = tl.constexpr(128)


@triton.jit
def _cut(seq_lens, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """The first position of the first split, the length of a split, and the number of splits, for contexts."""
    first = seq_lens * 0
    if WINDOW > 0:
        first = tl.maximum(seq_lens - WINDOW, 0) // MIN_SPLIT * MIN_SPLIT
    num_read = seq_lens - first
    split_len = tl.maximum(tl.cdiv(num_read, MIN_SPLIT * MAX_SPLITS), 1) * MIN_SPLIT
    return first, split_len, tl.cdiv(num_read, split_len)


@triton.jit
def _split_span(seq_len, split, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Positions of the first key that is seen, of the split's first key, and after its last."""
    first, split_len, _ = _cut(seq_len, WINDOW, MIN_SPLIT, MAX_SPLITS)
    start = first + split * split_len
    low = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    return low, start, tl.minimum(start + split_len, seq_len)


@triton.jit
def _find(
    number,  # of a split in the list of all
    query_start_loc,
    seq_lens,
    num_rows,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """The row of a split (past the last where there are fewer splits), and the number of splits of the rows before."""
    row, num_before, num_splits = 0, 0, 0
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = start + tl.arange(0, _ROWS_AT_ONCE)
        is_row = rows < num_rows
        lengths = tl.load(seq_lens + rows, mask=is_row, other=0)
        begins = tl.load(query_start_loc + rows, mask=is_row, other=0)
        is_decode = tl.load(query_start_loc + rows + 1, mask=is_row, other=0) - begins == 1
        _, _, counts = _cut(lengths, WINDOW, MIN_SPLIT, MAX_SPLITS)
        counts = tl.where(is_decode, counts, 0)
        ends = num_splits + tl.cumsum(counts, 0)
        is_before = ends <= number
        row += tl.sum(is_before.to(tl.int32), 0)
        num_before = tl.maximum(num_before, tl.max(tl.where(is_before, ends, 0), 0))
        num_splits += tl.sum(counts, 0)
    return row, num_before


@triton.jit(
    do_not_specialize=["num_rows", "max_splits", "table_stride"], do_not_specialize_on_alignment=PER_STEP_POINTERS
)
def _decode_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache,  # likewise
    query_start_loc,  # [num_rows + 1]
    seq_lens,  # [num_rows]
    block_tables,  # [num_rows, ...]
    alibi_slopes,  # [num_heads], or None
    key_scale,  # [num_kv_heads], or None
    totals,  # [num_rows, num_heads, max_splits, HEAD_DIM] float32: sums of weighted values
    weights,  # [num_rows, num_heads, max_splits, 2] float32: the exponent that all weights share, and their sum
    scale,
    soft_cap,
    query_stride,
    block_stride,
    table_stride,
    max_splits,
    num_rows,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    PADDED_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    members = tl.arange(0, PADDED_GROUP)
    is_member = members < GROUP
    unit = tl.program_id(0)
    number, kv_head = unit // num_kv_heads, unit % num_kv_heads
    # Lengths are older than the kernel before, which wrote keys and values, so they may be read while that one ends.
    row, num_before = _find(number, query_start_loc, seq_lens, num_rows, WINDOW, MIN_SPLIT, MAX_SPLITS)
    wait_for_previous()
    while row < num_rows:
        seq_len, split = tl.load(seq_lens + row), number - num_before
        heads, tokens = kv_head * GROUP + members % GROUP, tl.load(query_start_loc + row) + members * 0
        own = load_queries(query, tokens, heads, is_member, query_stride, HEAD_DIM, key_scale is not None)
        queries = own, tl.full([1], seq_len - 1, tl.int32), heads
        caches = key_cache, value_cache, block_tables + row.to(tl.int64) * table_stride, block_stride, kv_head
        span = _split_span(seq_len, split, WINDOW, MIN_SPLIT, MAX_SPLITS)
        factor, to_exponent = score_factors(scale, soft_cap, alibi_slopes, key_scale, kv_head)
        scoring = factor, to_exponent, soft_cap, alibi_slopes
        softmax = nothing_seen(PADDED_GROUP, HEAD_DIM)
        maxima, sums, values = attend(
            softmax, queries, caches, span, scoring, BLOCK_SIZE, HEAD_DIM, TILE, WINDOW, True, True
        )
        places = (row.to(tl.int64) * num_kv_heads * GROUP + heads) * max_splits + split
        tl.store(weights + places * 2, maxima * to_exponent, mask=is_member)
        tl.store(weights + places * 2 + 1, sums, mask=is_member)
        store_heads(totals, places, is_member, values, HEAD_DIM)
        unit += tl.num_programs(0)
        number, kv_head = unit // num_kv_heads, unit % num_kv_heads
        row, num_before = _find(number, query_start_loc, seq_lens, num_rows, WINDOW, MIN_SPLIT, MAX_SPLITS)


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=PER_STEP_POINTERS)
def _combine_kernel(
    totals,  # [num_rows, num_heads, max_splits, HEAD_DIM] float32
    weights,  # [num_rows, num_heads, max_splits, 2] float32
    query_start_loc,  # [num_rows + 1]
    seq_lens,  # [num_rows]
    value_scale,  # [num_kv_heads], or None
    sinks,  # [num_heads], or None
    out,  # [num_tokens, num_heads, HEAD_DIM]
    max_splits,
    num_heads,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    token = tl.load(query_start_loc + row).to(tl.int64)
    query_len = tl.load(query_start_loc + row + 1) - token
    _, _, num_splits = _cut(tl.load(seq_lens + row), WINDOW, MIN_SPLIT, MAX_SPLITS)
    wait_for_previous()
    if query_len != 1:
        return
    # As many as a row of this layer can have, whatever the table's width: the order of the sum is then the row's own.
    splits, columns = tl.arange(0, MAX_SPLITS), tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    is_used, is_column = splits < num_splits, columns < HEAD_DIM
    places = tl.program_id(0).to(tl.int64) * max_splits + splits
    exponents = tl.load(weights + places * 2, mask=is_used, other=float("-inf"))
    largest, sink = tl.max(exponents, 0), 0.0
    if sinks is not None:
        sink = tl.load(sinks + head) * 1.4426950408889634  # as an exponent of 2
        largest = tl.maximum(largest, sink)
    factors = tl.exp2(exponents - largest)
    sums = tl.load(weights + places * 2 + 1, mask=is_used, other=0.0)
    addresses = totals + places[:, None] * HEAD_DIM + columns[None, :]
    parts = tl.load(addresses, mask=is_used[:, None] & is_column[None, :], other=0.0)
    total = tl.sum(sums * factors, 0)
    if sinks is not None:
        total += tl.exp2(sink - largest)
    result = tl.sum(parts * factors[:, None], 0) / total
    if value_scale is not None:
        result = result * tl.load(value_scale + head // GROUP)
    tl.store(out + (token * num_heads + head) * HEAD_DIM + columns, result.to(out.dtype.element_ty), mask=is_column)


@dataclass(frozen=True, slots=True)
class Splits:
    """The parts of contexts in a layer; they follow from its shape alone.

    Attributes:
        min_len: Length of a split in tokens; long contexts have splits of a multiple of it.
        max_splits: The most splits of a row.
    """

    min_len: int
    max_splits: int

    def bound(self, max_seq_len: int, sliding_window: int | None) -> int:
        """The most splits that a context of up to `max_seq_len` tokens has."""
        num_read = max_seq_len if sliding_window is None else min(max_seq_len, sliding_window + self.min_len)
        bound: int = min(self.max_splits, triton.cdiv(num_read, self.min_len))
        return bound


def choose_splits(operands: Operands) -> Splits:
    """So short that a row alone keeps a GPU busy, and so long that partial sums are a 16th of what is read."""
    partial_share = 64 * operands.group // operands.inputs.key_cache.element_size()
    min_len = min(512, max(128, triton.next_power_of_2(partial_share)))
    return Splits(min_len, 32 if operands.num_kv_heads >= 8 else 64)


def attend_decodes(operands: Operands) -> None:
    """Fill the result for rows of one token. The memory taken depends on shapes only."""
    splits = choose_splits(operands)
    max_splits = splits.bound(operands.max_seq_len, operands.inputs.sliding_window)
    partial_shape = (operands.num_rows, operands.num_heads, max_splits)
    totals = operands.out.new_empty(*partial_shape, operands.head_dim, dtype=torch.float32)
    weights = operands.out.new_empty(*partial_shape, 2, dtype=torch.float32)
    constants = {
        "HEAD_DIM": operands.head_dim,
        "GROUP": operands.group,
        "WINDOW": operands.inputs.sliding_window or 0,
        "MIN_SPLIT": splits.min_len,
        "MAX_SPLITS": splits.max_splits,
    }
    _attend_splits(operands, totals, weights, constants)
    launch(
        _combine_kernel,
        (operands.num_rows * operands.num_heads,),
        totals,
        weights,
        operands.inputs.query_start_loc,
        operands.inputs.seq_lens,
        operands.inputs.value_scale,
        operands.inputs.sinks,
        operands.out,
        max_splits,
        operands.num_heads,
        num_warps=4 if operands.padded_dim > 64 else 2,
        launch_pdl=supports_dependent_launch(operands.out.device),
        **constants,
    )


def _attend_splits(
    operands: Operands, totals: torch.Tensor, weights: torch.Tensor, constants: Mapping[str, int]
) -> None:
    num_rows, _, max_splits, _ = totals.shape
    rows = max(16, triton.next_power_of_2(operands.group))  # what a product of matrices takes at least
    launch(
        _decode_kernel,
        (min(_MAX_PROGRAMS, num_rows * operands.num_kv_heads * max_splits),),
        operands.inputs.query,
        operands.inputs.key_cache,
        operands.inputs.value_cache,
        operands.inputs.query_start_loc,
        operands.inputs.seq_lens,
        operands.inputs.block_tables,
        operands.inputs.alibi_slopes,
        operands.inputs.key_scale,
        totals,
        weights,
        operands.inputs.scale,
        operands.inputs.soft_cap,
        operands.inputs.query.stride(0),
        operands.inputs.key_cache.stride(0),
        operands.inputs.block_tables.stride(0),
        max_splits,
        num_rows,
        operands.num_kv_heads,
        num_warps=_num_warps(operands, rows),
        num_stages=_num_stages(operands),
        launch_pdl=supports_dependent_launch(operands.out.device),
        BLOCK_SIZE=operands.block_size,
        PADDED_GROUP=rows,
        TILE=_tile(operands),
        **constants,
    )


def _tile(operands: Operands) -> int:
    """Keys of a tile: 8 KB of 16 bits, so that four programs of a multiprocessor have three tiles on their way each."""
    return max(16, min(128, (2048 if operands.is_wide else 4096) // operands.padded_dim))


def _num_warps(operands: Operands, rows: int) -> int:
    """The number of warps whose registers hold a tile of queries, its scores and its sums."""
    if rows <= 32:
        return 4
    return 16 if operands.is_wide and rows > 64 else 8


def _num_stages(operands: Operands) -> int:
    is_masked, is_large = operands.padded_dim != operands.head_dim, operands.padded_dim > 128
    is_widened = operands.inputs.key_scale is not None
    is_short = (is_widened and (is_masked or is_large)) or (operands.is_wide and is_large)
    return _NUM_STAGES_OF_WIDE if is_short else _NUM_STAGES
