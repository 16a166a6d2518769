"""RMS normalisation on a GPU, in tiles that depend on the row size alone."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.tiles import row_tile


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,  # [num_groups, group_rows, size], the rows of a group one after the other
    residual,  # [num_rows, size], with HAS_RESIDUAL
    weight,  # [size]
    out,  # [num_rows, size]
    total,  # [num_rows, size], with HAS_RESIDUAL
    num_rows,
    group_stride,
    group_rows,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    NUM_TILE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0) * NUM_TILE_ROWS + tl.arange(0, NUM_TILE_ROWS)[:, None]
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    is_inside = (row < num_rows) & (column < size)
    place = row.to(tl.int64) * size + column
    start = (row // group_rows).to(tl.int64) * group_stride + (row % group_rows).to(tl.int64) * size
    factors = tl.load(weight + column, mask=column < size, other=0.0)
    wait_for_previous()
    values = tl.load(x + start + column, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + place, mask=is_inside, other=0.0)
        # The sum is rounded to the type of x before it is normed, as it is where it is read again.
        values = (values.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, values, mask=is_inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / size + eps)
    normed = (wide * scale).to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_kernel(
    x,  # [num_tokens, num_heads, size]
    gate,  # [num_tokens, num_heads, size]
    weight,  # [size], or [num_heads, size]
    out,  # [num_tokens, num_heads, size]
    num_rows,
    x_stride,
    gate_stride,
    weight_stride,
    num_heads,
    size,
    eps,
    IS_GATED_FIRST: tl.constexpr,
    NUM_TILE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0) * NUM_TILE_ROWS + tl.arange(0, NUM_TILE_ROWS)[:, None]
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    is_inside = (row < num_rows) & (column < size)
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    place = head * size + column
    values = tl.load(x + token * x_stride + place, mask=is_inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + place, mask=is_inside, other=0.0).to(tl.float32)
    opened *= 1.0 / (1.0 + tl.exp(-opened))
    if IS_GATED_FIRST:
        values *= opened
    scale = tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / size + eps)
    factors = tl.load(weight + head * weight_stride + column, mask=is_inside, other=0.0)
    normed = (values * scale).to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
    if not IS_GATED_FIRST:
        normed = normed.to(out.dtype.element_ty).to(tl.float32) * opened
    tl.store(out + row.to(tl.int64) * size + column, normed.to(out.dtype.element_ty), mask=is_inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row; the heads of tokens may be slices of a wider projection."""
    out = x.new_empty(x.shape)
    size = x.shape[-1]
    if x.ndim == 3 and x.stride()[1:] == (size, 1):
        _run(x, x.stride(0), x.shape[1], None, weight, out, None, eps)
    else:
        _run(x.contiguous(), size, 1, None, weight, out, None, eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise in one pass."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _run(x, x.shape[-1], 1, residual, weight, out, total, eps)
    return out, total


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, is_gated_first: bool
) -> torch.Tensor:
    """Norms each head of a token by itself; tokens may be slices of wider projections."""
    num_tokens, num_heads, size = x.shape
    x, gate = (one if one.stride()[1:] == (size, 1) else one.contiguous() for one in (x, gate))
    out, tile = x.new_empty(x.shape), row_tile(size)
    weight_stride = size if weight.ndim == 2 else 0
    strides = x.stride(0), gate.stride(0), weight_stride
    arguments = (x, gate, weight.contiguous(), out, num_tokens * num_heads, *strides, num_heads, size, eps)
    constants: dict[str, Any] = {"IS_GATED_FIRST": is_gated_first, **tile.constants}
    launch(_gated_rms_norm_kernel, tile.grid(num_tokens * num_heads), *arguments, num_warps=tile.num_warps, **constants)
    return out


def _run(
    x: torch.Tensor,
    group_stride: int,
    group_rows: int,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    tile = row_tile(size)
    constants: dict[str, Any] = {"HAS_RESIDUAL": residual is not None, **tile.constants}
    constants["launch_pdl"] = supports_dependent_launch(x.device)
    arguments = (x, residual, weight, out, total, num_rows, group_stride, group_rows, size, eps)
    launch(_rms_norm_kernel, tile.grid(num_rows), *arguments, num_warps=tile.num_warps, **constants)
