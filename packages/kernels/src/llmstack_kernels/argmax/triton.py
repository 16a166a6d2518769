"""Argmax on a GPU: pieces of each row, then the best of the pieces.

A value and its index make one number that grows with the value and falls with the index, so that the largest number is
the answer in whatever order pieces are compared.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch

# So short that the rows of one sequence with 128,256 tokens keep 32 processors at work.
_PIECE_SIZE = 4096


@triton.jit
def value_order(values):
    """Numbers of int32 in the order of float32 `values`; zeros are equal, and what is no number is above all."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ascending = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values == values, ascending, 0x7FFFFFFF)


@triton.jit
def _best_of_pieces_kernel(
    values,  # [num_rows, size], rows apart by `row_stride`
    best,  # [num_rows, num_pieces] int64
    row_stride,
    size,
    PIECE_SIZE: tl.constexpr,
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * PIECE_SIZE + tl.arange(0, PIECE_SIZE)
    is_inside = column < size
    wait_for_previous()
    found = tl.load(values + row * row_stride + column, mask=is_inside, other=float("-inf")).to(tl.float32)
    # Columns outside lose by their index to a minus infinity inside.
    ranked = (value_order(found).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    tl.store(best + row * tl.num_programs(1) + piece, tl.max(ranked, axis=0))


@triton.jit
def _best_of_row_kernel(
    best,  # [num_rows, num_pieces] int64
    values,  # [num_rows, size], rows apart by `row_stride`
    largest,  # [num_rows]
    indices,  # [num_rows] int64
    row_stride,
    num_pieces,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK_SIZE)
    wait_for_previous()
    lowest = -0x7FFFFFFFFFFFFFFF
    ranked = tl.max(tl.load(best + row * num_pieces + piece, mask=piece < num_pieces, other=lowest), axis=0)
    index = 0x7FFFFFFF - (ranked & 0xFFFFFFFF)
    tl.store(indices + row, index)
    tl.store(largest + row, tl.load(values + row * row_stride + index))


def argmax(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All pieces of all rows at once, then a program per row."""
    values = values if values.stride(1) == 1 else values.contiguous()
    num_rows, size = values.shape
    num_pieces = triton.cdiv(size, _PIECE_SIZE)
    best = values.new_empty((num_rows, num_pieces), dtype=torch.int64)
    largest, indices = values.new_empty((num_rows,)), values.new_empty((num_rows,), dtype=torch.int64)
    stride = values.stride(0)
    chained = {"launch_pdl": supports_dependent_launch(values.device)}
    grid = (num_rows, num_pieces)
    launch(_best_of_pieces_kernel, grid, values, best, stride, size, PIECE_SIZE=_PIECE_SIZE, **chained)
    arguments = (best, values, largest, indices, stride, num_pieces)
    block_size = triton.next_power_of_2(num_pieces)
    launch(_best_of_row_kernel, (num_rows,), *arguments, num_warps=1, BLOCK_SIZE=block_size, **chained)
    return largest, indices
