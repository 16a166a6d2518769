"""Root-mean-square normalisation on a GPU: a program per row, so that a row never depends on its neighbours."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from llmstack_kernels.launch import describe, is_available, launch

__all__ = ["describe", "fused_add_rms_norm", "is_available", "rms_norm"]


@triton.jit
def _rms_norm_kernel(
    x,  # [num_groups, group_rows, size], the rows of a group one after the other
    residual,  # [num_rows, size], with HAS_RESIDUAL
    weight,  # [size]
    out,  # [num_rows, size]
    total,  # [num_rows, size], with HAS_RESIDUAL
    group_stride,
    group_rows,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    is_inside = columns < size
    start = x + row // group_rows * group_stride + row % group_rows * size
    values = tl.load(start + columns, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + row * size + columns, mask=is_inside, other=0.0)
        # The sum is rounded to the type of x before it is normed, as it is where it is read again.
        values = (values.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * size + columns, values, mask=is_inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    factors = tl.load(weight + columns, mask=is_inside, other=0.0)
    normed = (wide * scale).to(factors.dtype).to(tl.float32) * factors.to(tl.float32)
    tl.store(out + row * size + columns, normed.to(out.dtype.element_ty), mask=is_inside)


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
    block_size = triton.next_power_of_2(size)
    constants: dict[str, Any] = {"HAS_RESIDUAL": residual is not None, "BLOCK_SIZE": block_size}
    arguments = (x, residual, weight, out, total, group_stride, group_rows, size, eps)
    launch(_rms_norm_kernel, (x.numel() // size,), *arguments, num_warps=_num_warps(block_size), **constants)


def _num_warps(block_size: int) -> int:
    """So many that each thread has 8 to 16 values: one or two loads of 16 bytes."""
    return min(16, max(1, block_size // 512))
