"""Kernels that do nothing but one thing: read, write, or start."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from llmstack_kernels.launch import launch


@triton.jit
def _read_kernel(
    x,  # [size]
    out,  # [num_programs] float32
    size,
    NUM_ROUNDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.arange(0, BLOCK_SIZE)
    total = tl.zeros([BLOCK_SIZE], tl.float32)
    for round_index in range(NUM_ROUNDS):
        start = (round_index * num_programs + program) * BLOCK_SIZE
        total += tl.load(x + start + columns, mask=start + columns < size, other=0.0).to(tl.float32)
    tl.store(out + program, tl.sum(total, axis=0))


@triton.jit
def _write_kernel(
    out,  # [size]
    value,
    size,
    BLOCK_SIZE: tl.constexpr,
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(out + columns, tl.full([BLOCK_SIZE], value, out.dtype.element_ty), mask=columns < size)


@triton.jit
def _empty_kernel(
    out,  # [1] int32
    IS_CHAINED: tl.constexpr,
):
    # Everything is waited for that came before, as a kernel must that reads it, and the next may come meanwhile.
    if IS_CHAINED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    tl.store(out, 1)


def read_sums(x: torch.Tensor, num_programs: int, block_size: int, num_warps: int) -> torch.Tensor:
    """Sums of the parts of `x` (one-dimensional) that so many programs read in turns: float32 [num_programs]."""
    out = torch.empty(num_programs, dtype=torch.float32, device=x.device)
    num_rounds = -(-x.numel() // (num_programs * block_size))
    constants = {"NUM_ROUNDS": num_rounds, "BLOCK_SIZE": block_size}
    launch(_read_kernel, (num_programs,), x, out, x.numel(), num_warps=num_warps, num_stages=4, **constants)
    return out


def write_all(out: torch.Tensor, value: float, block_size: int = 4096) -> None:
    """Fills `out` (one-dimensional)."""
    grid = (-(-out.numel() // block_size),)
    launch(_write_kernel, grid, out, value, out.numel(), num_warps=8, BLOCK_SIZE=block_size)


def start_empty(out: torch.Tensor, *, is_chained: bool) -> None:
    """A kernel of one program that writes one number; chained, it is started before the kernel before it ends."""
    options = {"launch_pdl": True} if is_chained else {}
    launch(_empty_kernel, (1,), out, num_warps=1, IS_CHAINED=is_chained, **options)
