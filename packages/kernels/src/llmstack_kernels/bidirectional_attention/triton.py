"""Bidirectional attention on a GPU: crops, windows and texts, each for itself.

A program computes a tile of queries of one row and head, and walks over the row's keys in tiles that begin at its first
one. So a query's result depends on its own row alone. Rows of one length that follow each other are one launch, so that
no list of starts is copied to the device.

A head of 72 or 80 numbers is two parts, 64 and the rest: as 128 numbers it would take 1.6 times the products.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, possibly-undefined"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llmstack_kernels.bidirectional_attention import reference
from llmstack_kernels.bidirectional_attention.runs import pieces
from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.tiles import with_whole_heads

_HEAD_DIMS = range(8, 257)
_LEAST = 16  # numbers that a product of matrices takes at least
_STEP = 8  # numbers: Triton learns of strides only whether 16 divides them; so loads of 16 bytes have a head of 72, too
_LOG2_E = 1.4426950408889634


@triton.jit
def _load_part(head, rows, is_inside, row_stride, START: tl.constexpr, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Numbers from START on of rows [ROWS] of one head, with zeros behind its end: [ROWS, SIZE]."""
    columns = START + tl.arange(0, SIZE)
    addresses = head + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    return tl.load(addresses, mask=is_inside[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_part(head, rows, is_inside, row_stride, values, START: tl.constexpr, HEAD_DIM: tl.constexpr):
    columns = START + tl.arange(0, values.shape[1])
    addresses = head + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(addresses, values.to(head.dtype.element_ty), mask=is_inside[:, None] & (columns < HEAD_DIM)[None, :])


@triton.jit
def _weigh(scores, maxima, sums, to_exponent):
    """Maxima and sums with a tile of scores, its weights, and what was summed up before is to be multiplied with."""
    higher = tl.maximum(maxima, tl.max(scores, 1))
    weights = tl.exp2(tl.fma(scores, to_exponent, -(higher * to_exponent)[:, None]))
    kept = tl.exp2((maxima - higher) * to_exponent)
    return higher, sums * kept + tl.sum(weights, 1), weights, kept


@triton.jit
def _bidirectional_attention_kernel(
    query,  # [num_rows, num_queries, num_heads, HEAD_DIM], tokens and heads apart by strides
    key,  # [num_rows, length, num_heads, HEAD_DIM], likewise
    value,  # likewise
    out,  # [num_rows, num_queries, num_heads, HEAD_DIM]
    to_exponent,  # of a product, for powers of 2; above 0
    query_stride,  # this and the other strides in STEPs
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    num_queries,
    length,
    num_blocks,  # tiles of the queries of a row
    num_heads,
    STEP: tl.constexpr,  # numbers
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,  # numbers of the first part of a head, a power of two
    REST: tl.constexpr,  # of the second one, with zeros behind; 0: none
    ROWS: tl.constexpr,  # of a tile of queries
    TILE: tl.constexpr,  # of keys
):
    wait_for_previous()
    unit = tl.program_id(0)
    block, head, row = unit % num_blocks, unit // num_blocks % num_heads, (unit // num_blocks // num_heads).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    is_query = rows < num_queries
    query_step, key_step, value_step = query_stride * STEP, key_stride * STEP, value_stride * STEP
    own = query + row * num_queries * query_step + head * query_head_stride * STEP
    keys = key + row * length * key_step + head * key_head_stride * STEP
    values = value + row * length * value_step + head * value_head_stride * STEP
    own_main = _load_part(own, rows, is_query, query_step, 0, MAIN, HEAD_DIM)
    if REST > 0:
        own_rest = _load_part(own, rows, is_query, query_step, MAIN, REST, HEAD_DIM)
        rest = tl.zeros([ROWS, REST], tl.float32)
    main = tl.zeros([ROWS, MAIN], tl.float32)
    maxima, sums = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, length, TILE):
        places = start + tl.arange(0, TILE)
        is_key = places < length
        main_keys = _load_part(keys, places, is_key, key_step, 0, MAIN, HEAD_DIM)
        scores = tl.dot(own_main, tl.trans(main_keys), input_precision="ieee")
        if REST > 0:
            rest_keys = _load_part(keys, places, is_key, key_step, MAIN, REST, HEAD_DIM)
            scores = tl.dot(own_rest, tl.trans(rest_keys), scores, input_precision="ieee")
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        maxima, sums, weights, kept = _weigh(scores, maxima, sums, to_exponent)
        main_values = _load_part(values, places, is_key, value_step, 0, MAIN, HEAD_DIM)
        weights = weights.to(main_values.dtype)
        main = tl.dot(weights, main_values, main * kept[:, None], input_precision="ieee")
        if REST > 0:
            rest_values = _load_part(values, places, is_key, value_step, MAIN, REST, HEAD_DIM)
            rest = tl.dot(weights, rest_values, rest * kept[:, None], input_precision="ieee")
    target = out + (row * num_queries * num_heads + head) * HEAD_DIM
    _store_part(target, rows, is_query, num_heads * HEAD_DIM, main / sums[:, None], 0, HEAD_DIM)
    if REST > 0:
        _store_part(target, rows, is_query, num_heads * HEAD_DIM, rest / sums[:, None], MAIN, HEAD_DIM)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Sizes of a program for a head size; nothing of a call goes into them."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


# Numbers of a head, both parts together, up to which a choice holds: as in `paged_attention`.
_TILES = {64: _Tiles(128, 64, 8, 2), 128: _Tiles(128, 64, 8, 2), 256: _Tiles(64, 32, 8, 2)}
_WIDE_TILES = {64: _Tiles(32, 32, 4, 2), 128: _Tiles(32, 16, 4, 2), 256: _Tiles(32, 16, 8, 2)}  # float32


def _parts(head_dim: int) -> tuple[int, int]:
    """Sizes of both parts of a head, as powers of two; the second is 0 where there is none."""
    main = max(_LEAST, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    return main, max(_LEAST, triton.next_power_of_2(rest)) if rest > 0 else 0


def bidirectional_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_start_loc_list: Sequence[int], scale: float,
    first_query: int = 0,
) -> torch.Tensor:  # fmt: skip
    """A launch for each run of rows of one length; the reference has other head sizes, and scales of 0 or less."""
    num_heads, head_dim = query.shape[1:]
    if head_dim not in _HEAD_DIMS or not scale > 0 or query.dtype == torch.float64:
        return reference.bidirectional_attention(query, key, value, query_start_loc_list, scale, first_query)
    query, key, value = map(with_whole_heads, (query, key, value))
    out = query.new_empty(query.shape)
    main, rest = _parts(head_dim)
    strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:2]]
    step = math.gcd(_STEP, *strides)
    table = _WIDE_TILES if query.dtype == torch.float32 else _TILES
    tiles = next(tiles for size, tiles in table.items() if main + rest <= size or size == max(table))
    for piece in pieces(query_start_loc_list, first_query, len(query)):
        num_blocks = triton.cdiv(piece.num_queries, tiles.num_rows)
        launch(
            _bidirectional_attention_kernel,
            (num_blocks * num_heads * piece.num_rows,),
            query[piece.query_start :],
            key[piece.key_start :],
            value[piece.key_start :],
            out[piece.query_start :],
            scale * _LOG2_E,
            *(stride // step for stride in strides),
            piece.num_queries,
            piece.length,
            num_blocks,
            num_heads,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            launch_pdl=supports_dependent_launch(out.device),
            STEP=step,
            HEAD_DIM=head_dim,
            MAIN=main,
            REST=rest,
            ROWS=tiles.num_rows,
            TILE=tiles.num_keys,
        )
    return out
