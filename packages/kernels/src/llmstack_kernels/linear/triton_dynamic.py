"""Linear layers on a GPU whose inputs are rounded too, to 8-bit integers.

A first kernel rounds each row of inputs, a second one multiplies. No weight is widened, however many rows there are.
Sums of integers are exact, so tiles may follow the number of rows: a row has the bits of the reference in any batch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.linear.dynamic import DynamicWeight
from llmstack_kernels.linear.epilogue import store_outputs, tile_outputs
from llmstack_kernels.linear.packed_weight import SizedLinear
from llmstack_kernels.linear.reference import GATES

_BLOCK_K = 128
"""Inputs that are multiplied at once; rows and weights have zeros up to a multiple of it."""

_MAX_ROUNDED = 4096
"""Inputs of a row that a program has in registers; longer rows are read twice."""


@triton.jit
def _round_rows_kernel(
    x,  # [num_rows, in_features], rows `row_stride` apart
    integers,  # int8 [num_rows, padded_size], out
    scales,  # float32 [num_rows], out
    row_stride,
    in_features,
    padded_size,
    BLOCK_SIZE: tl.constexpr,
):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_SIZE)
    tops = tl.zeros((BLOCK_SIZE,), tl.float32)
    for start in tl.range(0, in_features, BLOCK_SIZE):
        is_inside = start + columns < in_features
        sizes = tl.abs(tl.load(x + row * row_stride + start + columns, mask=is_inside, other=0.0).to(tl.float32))
        # NaN is below nothing, so it becomes infinity here, which a maximum keeps.
        tops = tl.maximum(tops, tl.where(sizes < float("inf"), sizes, float("inf")))
    top = tl.max(tops, axis=0)
    num_known = tl.where(top < float("inf"), in_features, 0)  # a row that is no number gets zeros
    largest = tl.full((), 127.0, tl.float32)
    inverse = tl.where(top > 1e-30, tl.math.div_rn(largest, tl.maximum(top, 1e-30)), 0.0)
    tl.store(scales + row, tl.where(num_known > 0, tl.math.div_rn(top, largest), float("nan")))
    for start in tl.range(0, padded_size, BLOCK_SIZE):
        is_known = start + columns < num_known
        wide = tl.load(x + row * row_stride + start + columns, mask=is_known, other=0.0).to(tl.float32)
        # Above 2 ** 23 only integers are floats: the nearest one is what remains, of two the even one.
        rounded = (wide * inverse + 12582912.0) - 12582912.0
        tl.store(
            integers + row * padded_size + start + columns, rounded.to(tl.int8), mask=start + columns < padded_size
        )


@triton.jit(do_not_specialize=["num_rows"])
def _dynamic_linear_kernel(
    integers,  # int8 [num_rows, padded_size]
    row_scales,  # float32 [num_rows]
    weight,  # int8 [num_outs, padded_size]
    scales,  # float32 [num_outs]
    bias,  # float32 [num_outs], or None
    residual,  # [num_rows, num_outs], or None; half as many outputs with a gate
    out,  # like residual
    num_rows,
    padded_size,
    num_outs,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    row_tile, out_tile = tl.program_id(0), tl.program_id(1)
    outs = tile_outputs(out_tile, num_outs, BLOCK_OUT, IS_GATED)
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    known_rows = tl.minimum(rows, num_rows - 1)
    inputs = tl.arange(0, BLOCK_K)
    lefts = weight + outs.to(tl.int64)[:, None] * padded_size + inputs[None, :]
    rights = integers + known_rows.to(tl.int64)[None, :] * padded_size + inputs[:, None]
    wait_for_previous()
    sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.int32)
    for start in tl.range(0, padded_size, BLOCK_K, num_stages=NUM_STAGES):
        sums = tl.dot(tl.load(lefts + start), tl.load(rights + start), sums, out_dtype=tl.int32)
    factors = tl.load(row_scales + known_rows)[None, :] * tl.load(scales + outs)[:, None]
    store_outputs(
        sums.to(tl.float32) * factors, outs, rows, out_tile, None, bias, residual, out, num_rows, num_outs,
        "int8_dynamic", ACTIVATION, IS_GATED, bias is not None, residual is not None,
    )  # fmt: skip


class _Tile(NamedTuple):
    """The part that a program computes at once; it decides no bits."""

    block_out: int
    block_rows: int
    num_stages: int
    num_warps: int


def _choose_tile(num_rows: int, out_features: int) -> _Tile:
    """Few rows are bound by reading the weight, which many small tiles do; many keep the tensor cores busy."""
    if num_rows > 64:
        return _Tile(128, 128, 4, 8)
    block_rows = next(width for width in (16, 32, 64) if width >= num_rows)
    # Two tiles for each of an H200's 132 multiprocessors, if there are so many outputs; 64 are what wgmma takes.
    return _Tile(64 if out_features >= 64 * 264 or block_rows > 16 else 32, block_rows, 6, 4)


class TritonDynamicLinear(SizedLinear):
    """A weight in integers, each output with a scale of its own, for inputs of any floating type."""

    __slots__ = ("_bias", "_scales", "_weight")

    def __init__(self, weight: DynamicWeight, bias: torch.Tensor | None) -> None:
        """Pads the inputs with zeros to a multiple of what is multiplied at once."""
        super().__init__(weight.integers.shape)
        self._weight = F.pad(weight.integers, (0, -self.in_features % _BLOCK_K)).contiguous()
        self._scales = weight.scales.contiguous()
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(
        self,
        x: torch.Tensor,
        activation: str = "none",
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """activation(x Wᵀ + b) + residual."""
        rows = x if x.ndim == 2 else x.reshape(-1, self.in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        width = self.out_features // 2 if activation in GATES else self.out_features
        out = x.new_empty((*x.shape[:-1], width), dtype=out_dtype or x.dtype)
        num_rows = rows.shape[0]
        tile = _choose_tile(num_rows, self.out_features)
        integers, row_scales = self._round(rows)
        grid = (triton.cdiv(num_rows, tile.block_rows), triton.cdiv(self.out_features, tile.block_out))
        tensors = (integers, row_scales, self._weight, self._scales, self._bias, residual, out)
        launch(
            _dynamic_linear_kernel, grid, *tensors, num_rows, self._weight.shape[1], self.out_features,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
            launch_pdl=supports_dependent_launch(rows.device), ACTIVATION=GATES.get(activation, activation),
            IS_GATED=activation in GATES, BLOCK_OUT=tile.block_out, BLOCK_ROWS=tile.block_rows, BLOCK_K=_BLOCK_K,
            NUM_STAGES=tile.num_stages,
        )  # fmt: skip
        return out

    def _round(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The integers of each row, with zeros behind the last input, and the scales of the rows."""
        num_rows, padded_size = rows.shape[0], self._weight.shape[1]
        integers = torch.empty((num_rows, padded_size), dtype=torch.int8, device=rows.device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
        launch(
            _round_rows_kernel, (num_rows,), rows, integers, scales, rows.stride(0), self.in_features, padded_size,
            num_warps=8 if padded_size > 1024 else 4, enable_fp_fusion=False,
            launch_pdl=supports_dependent_launch(rows.device),
            BLOCK_SIZE=min(_MAX_ROUNDED, triton.next_power_of_2(padded_size)),
        )  # fmt: skip
        return integers, scales


def pack_dynamic_linear(weight: DynamicWeight, dtype: torch.dtype, bias: torch.Tensor | None) -> TritonDynamicLinear:
    """Pack a weight in integers; inputs of any type are rounded alike."""
    return TritonDynamicLinear(weight, bias)
