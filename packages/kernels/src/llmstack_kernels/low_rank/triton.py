"""Low-rank updates on a GPU: two kernels over tiles of rows with the same adapter.

A tile has 16 rows at most and always the same instructions, so a row's bits do not depend on the rows beside it. How
many tiles there are is read on the device: a captured step starts as many as its rows and slots could need. Long
inputs are divided into splits, whose sums are added in order: their number depends on the layer alone. Where there are
few rows, each split is a program's.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.launch import launch
from llmstack_kernels.low_rank import reference
from llmstack_kernels.low_rank.slots import MAX_PARTS, PANEL_SIZE, ExpertRows, LowRankSlots

_BLOCK_ROWS = 16
_BLOCK_K = 64
_SPLIT_INPUTS = 1024
"""Inputs of a split. A few rows are a few tiles, so one program for each would leave a GPU idle."""
_MAX_SPLIT_ROWS = 512
"""Up to so many rows each split is a program's. More are tiles enough, and sums of all splits could be a gigabyte."""
_BLOCK_OUT = 64
_WORDS_PER_PART = 5
_LEAST_RANK = 16  # what the tensor cores multiply at least


@triton.jit
def _reduce_kernel(
    x,  # [num_rows, in_features], rows `x_stride` apart
    words,  # int64, of the layer: [num_slots, MAX_PARTS, 5], slots `slot_stride` apart
    rows,  # int32 [num_places]
    tiles,  # int32 [num_tiles, 3]: slot, first place, number of rows
    num_tiles,  # int32 [1]
    reduced,  # float32 [num_sums, num_places, MAX_PARTS, RANK]
    x_stride,
    slot_stride,
    in_features,
    num_places,
    MAX_PARTS: tl.constexpr,
    WORDS_PER_PART: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    SPLITS_EACH: tl.constexpr,
):
    tile, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = words + tl.load(tiles + 3 * tile).to(tl.int64) * slot_stride + part * WORDS_PER_PART
    address = tl.load(own)
    if (tile < tl.load(num_tiles)) & (address != 0):
        a = address.to(tl.pointer_type(x.dtype.element_ty))
        rank = tl.load(own + 2)
        places = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_ROWS)
        is_row = tl.arange(0, BLOCK_ROWS) < tl.load(tiles + 3 * tile + 2)
        row = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
        ranks = tl.arange(0, RANK)
        total = tl.zeros((BLOCK_ROWS, RANK), tl.float32)
        for number in range(split * SPLITS_EACH, (split + 1) * SPLITS_EACH):
            sums = tl.zeros((BLOCK_ROWS, RANK), tl.float32)
            first = number * SPLIT_INPUTS
            for start in range(0, min(SPLIT_INPUTS, in_features - first), BLOCK_K):
                inputs = first + start + tl.arange(0, BLOCK_K)
                is_input = inputs < in_features
                left_mask, right_mask = is_row[:, None] & is_input[None, :], is_input[:, None] & (ranks < rank)[None, :]
                left = tl.load(x + row[:, None] * x_stride + inputs[None, :], mask=left_mask, other=0.0)
                right = tl.load(a + ranks[None, :] * in_features + inputs[:, None], mask=right_mask, other=0.0)
                sums = tl.dot(left, right, sums, input_precision="ieee")
            total += sums
        out_places = split.to(tl.int64) * num_places + places
        out = reduced + (out_places[:, None] * MAX_PARTS + part) * RANK + ranks[None, :]
        tl.store(out, total, mask=is_row[:, None] & (ranks < RANK)[None, :])


@triton.jit
def _pick_kernel(
    ids,  # int64 [num_rows]
    words,
    rows,
    tiles,
    num_tiles,
    reduced,  # float32 [1, num_places, MAX_PARTS, RANK]
    like,  # a tensor of the factors' type
    slot_stride,
    num_ids,
    MAX_PARTS: tl.constexpr,
    WORDS_PER_PART: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    own = words + tl.load(tiles + 3 * tile).to(tl.int64) * slot_stride + part * WORDS_PER_PART
    address = tl.load(own)
    if (tile < tl.load(num_tiles)) & (address != 0):
        a = address.to(tl.pointer_type(like.dtype.element_ty))
        places = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_ROWS)
        is_row = tl.arange(0, BLOCK_ROWS) < tl.load(tiles + 3 * tile + 2)
        row = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
        own_ids = tl.load(ids + row, mask=is_row, other=0)
        ranks = tl.arange(0, RANK)
        mask = is_row[:, None] & (ranks < tl.load(own + 2))[None, :]
        picked = tl.load(a + ranks.to(tl.int64)[None, :] * num_ids + own_ids[:, None], mask=mask, other=0.0)
        out = reduced + (places.to(tl.int64)[:, None] * MAX_PARTS + part) * RANK + ranks[None, :]
        tl.store(out, picked.to(tl.float32), mask=is_row[:, None] & (ranks < RANK)[None, :])


@triton.jit
def _expand_kernel(
    y,  # [num_rows, out_features]
    words,
    rows,
    tiles,
    num_tiles,
    reduced,
    like,  # a tensor of the factors' type
    slot_stride,
    out_features,
    num_places,
    MAX_PARTS: tl.constexpr,
    WORDS_PER_PART: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    PANEL_SIZE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    tile = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    slot = words + tl.load(tiles + 3 * tile).to(tl.int64) * slot_stride
    places = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_ROWS)
    is_row = tl.arange(0, BLOCK_ROWS) < tl.load(tiles + 3 * tile + 2)
    row = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
    ranks = tl.arange(0, RANK)
    is_tile = tile < tl.load(num_tiles)
    for part in range(MAX_PARTS):
        own = slot + part * WORDS_PER_PART
        address = tl.load(own + 1)
        if is_tile & (address != 0):
            b = address.to(tl.pointer_type(like.dtype.element_ty))
            rank, first, num_outputs = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
            outputs = columns - first
            is_own = (outputs >= 0) & (outputs < num_outputs) & (columns < out_features)
            left_places = reduced + (places.to(tl.int64)[:, None] * MAX_PARTS + part) * RANK + ranks[None, :]
            left_mask = is_row[:, None] & (ranks < rank)[None, :]
            left = tl.load(left_places, mask=left_mask, other=0.0)
            for _ in range(1, NUM_SUMS):
                left_places += num_places * MAX_PARTS * RANK
                left += tl.load(left_places, mask=left_mask, other=0.0)
            right_mask = (ranks < rank)[:, None] & is_own[None, :]
            panels = outputs // PANEL_SIZE * rank * PANEL_SIZE + outputs % PANEL_SIZE
            right = tl.load(b + ranks[:, None] * PANEL_SIZE + panels[None, :], mask=right_mask, other=0.0)
            update = tl.dot(left, right.to(tl.float32), input_precision=PRECISION)
            out, out_mask = y + row[:, None] * out_features + columns[None, :], is_row[:, None] & is_own[None, :]
            before = tl.load(out, mask=out_mask, other=0.0).to(tl.float32)
            tl.store(out, (before + update).to(y.dtype.element_ty), mask=out_mask)


def add_low_rank_(y: torch.Tensor, x: torch.Tensor, slots: LowRankSlots | ExpertRows, layer: int) -> None:
    """Adds the updates; a captured call reads the tiles again when it is replayed."""
    x = x if x.stride(1) == 1 else x.contiguous()
    words, constants, num_rows = slots.words_of(layer), _constants(slots.max_rank_of(layer)), x.shape[0]
    num_splits = triton.cdiv(x.shape[1], _SPLIT_INPUTS)
    splits_each = 1 if num_rows <= _MAX_SPLIT_ROWS else num_splits
    num_sums = num_splits // splits_each
    reduced = x.new_empty((num_sums, num_rows, MAX_PARTS, constants["RANK"]), dtype=torch.float32)
    launch(
        _reduce_kernel, (slots.num_launched_tiles, MAX_PARTS, num_sums), x, words, slots.rows, slots.tiles,
        slots.num_tiles, reduced, x.stride(0), words.stride(0), x.shape[1], num_rows, BLOCK_K=_BLOCK_K,
        SPLIT_INPUTS=_SPLIT_INPUTS, SPLITS_EACH=splits_each, **constants,
    )  # fmt: skip
    _expand(y, words, slots, reduced, x, constants)


def add_low_rank_to_embedding_(
    y: torch.Tensor, ids: torch.Tensor, slots: LowRankSlots, layer: int, num_ids: int
) -> None:
    """Adds the updates; a captured call reads ids and tiles again when it is replayed."""
    words, constants = slots.words_of(layer), _constants(slots.max_rank_of(layer))
    reduced = y.new_empty((1, len(y), MAX_PARTS, constants["RANK"]), dtype=torch.float32)
    launch(
        _pick_kernel, (slots.num_launched_tiles, MAX_PARTS), ids, words, slots.rows, slots.tiles, slots.num_tiles,
        reduced, y, words.stride(0), num_ids, **constants,
    )  # fmt: skip
    _expand(y, words, slots, reduced, y, constants)


def _constants(max_rank: int) -> dict[str, int]:
    rank = max(_LEAST_RANK, triton.next_power_of_2(max_rank))
    return {"MAX_PARTS": MAX_PARTS, "WORDS_PER_PART": _WORDS_PER_PART, "RANK": rank, "BLOCK_ROWS": _BLOCK_ROWS}


def _expand(
    y: torch.Tensor,
    words: torch.Tensor,
    slots: LowRankSlots | ExpertRows,
    reduced: torch.Tensor,
    like: torch.Tensor,
    constants: dict[str, int],
) -> None:
    """Multiplies by the second factors, and adds; `like` has the factors' type.

    Factors of 16 bits are exact in TF32, and three products keep the bits of the first ones: so tensor cores serve.
    """
    out_features = y.shape[1]
    launch(
        _expand_kernel, (slots.num_launched_tiles, triton.cdiv(out_features, _BLOCK_OUT)), y, words, slots.rows,
        slots.tiles, slots.num_tiles, reduced, like, words.stride(0), out_features, reduced.shape[1],
        PANEL_SIZE=PANEL_SIZE, BLOCK_OUT=_BLOCK_OUT, NUM_SUMS=reduced.shape[0],
        PRECISION="ieee" if like.dtype == torch.float32 else "tf32x3", **constants,
    )  # fmt: skip


def activate_rounded(x: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """The activation of x, as PyTorch computes it in float32."""
    return reference.activate_rounded(x, activation, dtype)
