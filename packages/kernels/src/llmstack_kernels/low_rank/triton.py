"""Low-rank updates on a GPU: two kernels over tiles of rows with the same adapter.

A tile has 16 rows at most and always the same instructions, so a row's bits do not depend on the rows beside it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.launch import describe, is_available, launch
from llmstack_kernels.low_rank import reference
from llmstack_kernels.low_rank.slots import MAX_PARTS, PANEL_SIZE, ExpertRows, LowRankSlots

__all__ = ["activate_rounded", "add_low_rank_", "describe", "is_available"]

_BLOCK_ROWS = 16
_BLOCK_K = 64
_BLOCK_OUT = 64
_WORDS_PER_PART = 5
_LEAST_RANK = 16  # what the tensor cores multiply at least


@triton.jit
def _reduce_kernel(
    x,  # [num_rows, in_features], rows `x_stride` apart
    words,  # int64, of the layer: [num_slots, MAX_PARTS, 5], slots `slot_stride` apart
    rows,  # int32 [num_places]
    tiles,  # int32 [num_tiles, 3]: slot, first place, number of rows
    reduced,  # float32 [num_places, MAX_PARTS, RANK]
    x_stride,
    slot_stride,
    in_features,
    MAX_PARTS: tl.constexpr,
    WORDS_PER_PART: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    own = words + tl.load(tiles + 3 * tile).to(tl.int64) * slot_stride + part * WORDS_PER_PART
    address = tl.load(own)
    if address != 0:
        a = address.to(tl.pointer_type(x.dtype.element_ty))
        rank = tl.load(own + 2)
        places = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_ROWS)
        is_row = tl.arange(0, BLOCK_ROWS) < tl.load(tiles + 3 * tile + 2)
        row = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
        ranks = tl.arange(0, RANK)
        sums = tl.zeros((BLOCK_ROWS, RANK), tl.float32)
        for start in range(0, in_features, BLOCK_K):
            inputs = start + tl.arange(0, BLOCK_K)
            is_input = inputs < in_features
            left_mask, right_mask = is_row[:, None] & is_input[None, :], is_input[:, None] & (ranks < rank)[None, :]
            left = tl.load(x + row[:, None] * x_stride + inputs[None, :], mask=left_mask, other=0.0)
            right = tl.load(a + ranks[None, :] * in_features + inputs[:, None], mask=right_mask, other=0.0)
            sums = tl.dot(left, right, sums, input_precision="ieee")
        out = reduced + (places.to(tl.int64)[:, None] * MAX_PARTS + part) * RANK + ranks[None, :]
        tl.store(out, sums, mask=is_row[:, None] & (ranks < RANK)[None, :])


@triton.jit
def _expand_kernel(
    y,  # [num_rows, out_features]
    words,
    rows,
    tiles,
    reduced,
    like,  # a tensor of the factors' type
    slot_stride,
    out_features,
    MAX_PARTS: tl.constexpr,
    WORDS_PER_PART: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
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
    for part in tl.static_range(MAX_PARTS):
        own = slot + part * WORDS_PER_PART
        address = tl.load(own + 1)
        if address != 0:
            b = address.to(tl.pointer_type(like.dtype.element_ty))
            rank, first, num_outputs = tl.load(own + 2), tl.load(own + 3), tl.load(own + 4)
            outputs = columns - first
            is_own = (outputs >= 0) & (outputs < num_outputs) & (columns < out_features)
            left_places = (places.to(tl.int64)[:, None] * MAX_PARTS + part) * RANK + ranks[None, :]
            left = tl.load(reduced + left_places, mask=is_row[:, None] & (ranks < rank)[None, :], other=0.0)
            right_mask = (ranks < rank)[:, None] & is_own[None, :]
            panels = outputs // PANEL_SIZE * rank * PANEL_SIZE + outputs % PANEL_SIZE
            right = tl.load(b + ranks[:, None] * PANEL_SIZE + panels[None, :], mask=right_mask, other=0.0)
            update = tl.dot(left, right.to(tl.float32), input_precision="ieee")
            out, out_mask = y + row[:, None] * out_features + columns[None, :], is_row[:, None] & is_own[None, :]
            before = tl.load(out, mask=out_mask, other=0.0).to(tl.float32)
            tl.store(out, (before + update).to(y.dtype.element_ty), mask=out_mask)


def add_low_rank_(y: torch.Tensor, x: torch.Tensor, slots: LowRankSlots | ExpertRows, layer: int) -> None:
    """Adds the updates of the tiles that the host has counted."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tiles, out_features = len(slots.host_tiles), y.shape[1]
    rank = max(_LEAST_RANK, triton.next_power_of_2(slots.max_rank))
    reduced = x.new_empty((slots.rows.shape[0], MAX_PARTS, rank), dtype=torch.float32)
    words = slots.words_of(layer)
    stride = words.stride(0)
    constants = {
        "MAX_PARTS": MAX_PARTS,
        "WORDS_PER_PART": _WORDS_PER_PART,
        "RANK": rank,
        "BLOCK_ROWS": _BLOCK_ROWS,
    }
    launch(
        _reduce_kernel, (num_tiles, MAX_PARTS), x, words, slots.rows, slots.tiles, reduced, x.stride(0), stride,
        x.shape[1], BLOCK_K=_BLOCK_K, **constants,
    )  # fmt: skip
    launch(
        _expand_kernel, (num_tiles, triton.cdiv(out_features, _BLOCK_OUT)), y, words, slots.rows, slots.tiles, reduced,
        x, stride, out_features, PANEL_SIZE=PANEL_SIZE, BLOCK_OUT=_BLOCK_OUT, **constants,
    )  # fmt: skip


def activate_rounded(x: torch.Tensor, activation: str, dtype: torch.dtype) -> torch.Tensor:
    """The activation of x, as PyTorch computes it in float32."""
    return reference.activate_rounded(x, activation, dtype)
