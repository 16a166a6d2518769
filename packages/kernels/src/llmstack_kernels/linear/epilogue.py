"""Epilogue of a product on a GPU: bias, activation or gate, residual.

It is computed in float32, before the only rounding."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from llmstack_kernels.activation.triton import activate


@triton.jit
def tile_outputs(tile, num_outs, BLOCK_OUT: tl.constexpr, IS_GATED: tl.constexpr):
    """The outputs that a tile computes, [BLOCK_OUT]: a run, or with a gate a run of gates and then what they gate.

    Beyond the last output, the last one is computed again; it is not stored.
    """
    places = tl.arange(0, BLOCK_OUT)
    if IS_GATED:
        HALF: tl.constexpr = BLOCK_OUT // 2
        gates = tl.minimum(tile * HALF + places % HALF, num_outs // 2 - 1)
        return tl.where(places < HALF, gates, gates + num_outs // 2)
    else:
        return tl.minimum(tile * BLOCK_OUT + places, num_outs - 1)


@triton.jit
def activate_or_gate(
    sums,  # float32 [BLOCK_OUT, BLOCK_ROWS]
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """[BLOCK_OUT, BLOCK_ROWS], or half as many outputs with a gate."""
    if IS_GATED:
        halves = sums.reshape(2, sums.shape[0] // 2, sums.shape[1])
        gate, gated = tl.split(halves.permute(1, 2, 0))
        return activate(gate, ACTIVATION) * gated
    else:
        return activate(sums, ACTIVATION)


@triton.jit
def store_outputs(
    sums, outs, rows, out_tile, scales, bias, residual, out, num_rows, num_outs,
    FORMAT: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    if FORMAT == "fp8":
        sums *= tl.load(scales + outs)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + outs).to(tl.float32)[:, None]
    results = tl.trans(activate_or_gate(sums, ACTIVATION, IS_GATED))
    width = num_outs // 2 if IS_GATED else num_outs
    columns = out_tile * results.shape[1] + tl.arange(0, results.shape[1])
    is_inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    if HAS_RESIDUAL:
        results += tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + places, results.to(out.dtype.element_ty), mask=is_inside)
