"""Layer normalisation on a GPU, in tiles that depend on the size of a row only."""

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
def _layer_norm_kernel(
    x,  # [num_rows, size]
    residual,  # [num_rows, size], with HAS_RESIDUAL
    weight,  # [size]
    bias,  # [size], with HAS_BIAS
    out,  # [num_rows, size]
    total,  # [num_rows, size], with HAS_RESIDUAL
    num_rows,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_TILE_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0) * NUM_TILE_ROWS + tl.arange(0, NUM_TILE_ROWS)[:, None]
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    is_column = column < size
    is_inside = (row < num_rows) & is_column
    place = row.to(tl.int64) * size + column
    factors = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    wait_for_previous()
    values = tl.load(x + place, mask=is_inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + place, mask=is_inside, other=0.0)
        # The sum is rounded to the type of x before it is normed, as it is where it is read again.
        values = (values.to(tl.float32) + added.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, values, mask=is_inside)
    wide = values.to(tl.float32)
    mean = tl.sum(wide, axis=1, keep_dims=True) / size
    centred = tl.where(is_column, wide - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / size + eps)
    normed = centred * scale * factors + shift
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=is_inside)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _run(x, None, weight, bias, out, None, eps)
    return out


def fused_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise in one pass."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _run(x, residual, weight, bias, out, total, eps)
    return out, total


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    size = x.shape[-1]
    num_rows = x.numel() // size
    tile = row_tile(size)
    constants: dict[str, Any] = {"HAS_RESIDUAL": residual is not None, "HAS_BIAS": bias is not None, **tile.constants}
    constants["launch_pdl"] = supports_dependent_launch(x.device)
    arguments = (x, residual, weight, bias, out, total, num_rows, size, eps)
    launch(_layer_norm_kernel, tile.grid(num_rows), *arguments, num_warps=tile.num_warps, **constants)
