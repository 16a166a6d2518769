"""Inputs of decode steps on a GPU, with a program per row.

A program copies no more block ids than the row's context has."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.decode_inputs import DecodeInputs
from llmstack_kernels.launch import launch

_NUM_UPDATES = 256
_NUM_BLOCKS = 256
_NUM_ROWS = 128


# Numbers of updates and of rows differ from step to step: they must not decide which of several kernels is compiled.
@triton.jit(do_not_specialize=["num_updates"])
def _update_rows_kernel(
    state,  # [num_state_rows, width]
    updates,  # [num_updates, 3]: row, column, value
    num_updates,
    width,
    BLOCK_SIZE: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = index < num_updates
    row = tl.load(updates + 3 * index, mask=is_inside, other=0).to(tl.int64)
    column = tl.load(updates + 3 * index + 1, mask=is_inside, other=0)
    value = tl.load(updates + 3 * index + 2, mask=is_inside, other=0)
    tl.store(state + row * width + column, value, mask=is_inside)


@triton.jit
def _decode_inputs_kernel(
    state,  # [num_state_rows, 2 + max_blocks_per_row]
    rows,  # [num_rows]
    drafts,  # [num_rows, 2]: places behind the last known token, and the draft; or None
    token_ids,  # [num_rows]
    positions,  # [num_rows]
    seq_lens,  # [num_rows]
    slot_mapping,  # [num_rows]
    block_tables,  # [num_rows, max_blocks_per_row]
    width,
    table_stride,
    block_size,
    BLOCK_SIZE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    line = state + tl.load(rows + index).to(tl.int64) * width
    token_id = tl.load(line)
    position = tl.load(line + 1)
    if drafts is not None:
        place = tl.load(drafts + 2 * index)
        token_id = tl.where(place > 0, tl.load(drafts + 2 * index + 1), token_id)
        position += place
    block_index = position // block_size
    block = tl.load(line + 2 + block_index).to(tl.int64)
    tl.store(token_ids + index, token_id.to(tl.int64))
    tl.store(positions + index, position.to(tl.int64))
    tl.store(seq_lens + index, position + 1)
    tl.store(slot_mapping + index, block * block_size + position % block_size)
    start = block_index * 0
    while start <= block_index:
        columns = start + tl.arange(0, BLOCK_SIZE)
        is_needed = columns <= block_index
        blocks = tl.load(line + 2 + columns, mask=is_needed, other=0)
        tl.store(block_tables + index * table_stride + columns, blocks, mask=is_needed)
        start += BLOCK_SIZE


@triton.jit(do_not_specialize=["num_rows"])
def _advance_rows_kernel(
    state,  # [num_state_rows, width]
    rows,  # [num_rows]
    token_ids,  # [num_rows]
    is_good,  # [num_rows]
    results,  # [num_rows]
    num_rows,
    width,
    scratch_row,
    BLOCK_SIZE: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = index < num_rows
    row = tl.load(rows + index, mask=is_inside, other=0).to(tl.int64)
    token_id = tl.load(token_ids + index, mask=is_inside, other=0).to(tl.int32)
    good = tl.load(is_good + index, mask=is_inside, other=0) != 0
    tl.store(results + index, tl.where(good, token_id, -1), mask=is_inside)
    is_real = is_inside & (row < scratch_row)
    line = state + row * width
    position = tl.load(line + 1, mask=is_real, other=0)
    tl.store(line, tl.where(good, token_id, 0), mask=is_real)
    tl.store(line + 1, position + 1, mask=is_real)


@triton.jit(do_not_specialize=["num_rows"])
def _keep_drafts_kernel(
    state,  # [num_state_rows, width]
    rows,  # [num_rows]
    drafts,  # [num_rows, 2]: places behind the last known token, and the draft
    token_ids,  # [num_rows]
    is_good,  # [num_rows]
    num_kept,  # [num_rows], out
    num_rows,
    width,
    scratch_row,
    BLOCK_SIZE: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = index < num_rows
    row = tl.load(rows + index, mask=is_inside, other=0).to(tl.int64)
    place = tl.load(drafts + 2 * index, mask=is_inside, other=0)
    is_reached = is_inside
    most = tl.max(place, axis=0)
    distance = most * 0 + 1
    while distance <= most:
        is_before = is_inside & (distance <= place)
        is_reached &= _is_next_right(drafts, token_ids, is_good, index - distance, num_rows, is_before) | ~is_before
        distance += 1
    is_last = is_reached & ~_is_next_right(drafts, token_ids, is_good, index, num_rows, is_inside)
    is_last &= row < scratch_row
    tl.store(num_kept + index, tl.where(is_last, place + 1, 0).to(tl.int64), mask=is_inside)
    token_id = tl.load(token_ids + index, mask=is_last, other=0).to(tl.int32)
    good = tl.load(is_good + index, mask=is_last, other=0) != 0
    line = state + row * width
    position = tl.load(line + 1, mask=is_last, other=0)
    tl.store(line, tl.where(good, token_id, 0), mask=is_last)
    tl.store(line + 1, position + place + 1, mask=is_last)


@triton.jit
def _is_next_right(drafts, token_ids, is_good, index, num_rows, mask):
    """Whether the line behind each of `index` is a draft of its row that equals the token chosen here."""
    has_next = mask & (index + 1 < num_rows)
    place = tl.load(drafts + 2 * index + 2, mask=has_next, other=0)
    draft = tl.load(drafts + 2 * index + 3, mask=has_next, other=0)
    token_id = tl.load(token_ids + index, mask=mask, other=0).to(tl.int32)
    good = tl.load(is_good + index, mask=mask, other=0) != 0
    return good & (place > 0) & (token_id == draft)


def update_rows(state: torch.Tensor, updates: torch.Tensor) -> None:
    num_updates = len(updates)
    grid = (triton.cdiv(num_updates, _NUM_UPDATES),)
    arguments = (state, updates.contiguous(), num_updates, state.shape[1])
    launch(_update_rows_kernel, grid, *arguments, num_warps=4, BLOCK_SIZE=_NUM_UPDATES)


def decode_inputs(
    state: torch.Tensor, rows: torch.Tensor, block_size: int, out: DecodeInputs, drafts: torch.Tensor | None = None
) -> None:
    """A program per row."""
    tensors = (state, rows, drafts, out.token_ids, out.positions, out.seq_lens, out.slot_mapping, out.block_tables)
    sizes = (state.shape[1], out.block_tables.stride(0), block_size)
    launch(_decode_inputs_kernel, (len(rows),), *tensors, *sizes, num_warps=2, BLOCK_SIZE=_NUM_BLOCKS)


def advance_rows(
    state: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, is_good: torch.Tensor, results: torch.Tensor
) -> None:
    num_rows = len(rows)
    arguments = (state, rows, token_ids, is_good, results, num_rows, state.shape[1], len(state) - 1)
    launch(_advance_rows_kernel, (triton.cdiv(num_rows, _NUM_ROWS),), *arguments, num_warps=4, BLOCK_SIZE=_NUM_ROWS)


def keep_drafts(
    state: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    token_ids: torch.Tensor,
    is_good: torch.Tensor,
    num_kept: torch.Tensor,
) -> None:
    """Each line looks back at those of its row; the one that is kept last writes the row's state."""
    num_rows = len(rows)
    arguments = (state, rows, drafts, token_ids, is_good, num_kept, num_rows, state.shape[1], len(state) - 1)
    launch(_keep_drafts_kernel, (triton.cdiv(num_rows, _NUM_ROWS),), *arguments, num_warps=4, BLOCK_SIZE=_NUM_ROWS)
