"""Tiles of Triton programs: rows for norms, heads for rotation and KV writes."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

# Values of a program: with 4 bytes or less each, short rows go together until every thread has loads of 16 bytes.
_MIN_VALUES = 1024
_VALUES_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class RowTile:
    """Whole rows of one program. It depends on the size of a row only: so does the order of a row's sums."""

    num_rows: int
    block_size: int

    @property
    def num_warps(self) -> int:
        """The number of warps with 16 values for each thread: two loads of 16 bytes of 16-bit numbers."""
        return min(16, max(1, self.num_rows * self.block_size // _VALUES_PER_WARP))

    @property
    def constants(self) -> dict[str, int]:
        """Constants of a kernel."""
        return {"NUM_TILE_ROWS": self.num_rows, "BLOCK_SIZE": self.block_size}

    def grid(self, num_rows: int) -> tuple[int]:
        """Programs for so many rows."""
        return (-(-num_rows // self.num_rows),)


def row_tile(size: int) -> RowTile:
    """The tile for rows of `size` values."""
    block_size = 1 << (size - 1).bit_length()
    return RowTile(max(1, _MIN_VALUES // block_size), block_size)


# Pairs of numbers in a tile: 8 of a thread, so that 16-bit ones are loaded 16 bytes at a time.
_NUM_TILE_PAIRS = 512
NUM_WARPS = 2


def head_constants(head_dim: int, rotary_dim: int) -> dict[str, Any]:
    """Constants of kernels over tiles of heads; they depend on the shape of a head only."""
    block_half = triton.next_power_of_2(rotary_dim // 2)
    rest = head_dim - rotary_dim
    return {
        "HEAD_DIM": head_dim,
        "HALF": rotary_dim // 2,
        "NUM_TILE_HEADS": max(1, _NUM_TILE_PAIRS // block_half),
        "BLOCK_HALF": block_half,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
    }


def with_whole_heads(x: torch.Tensor) -> torch.Tensor:
    """`x` with the dimensions of each head one after another."""
    return x if x.stride(2) == 1 else x.contiguous()


@triton.jit
def store_rotated_heads(
    x,  # [num_heads, HEAD_DIM] of a token, heads apart by `head_stride`
    out,  # [num_heads, HEAD_DIM], heads apart by `out_head_stride`
    scale,  # [num_heads] float32 that stored numbers are divided by, or None
    norm,  # [HEAD_DIM] that normed heads are multiplied by, if every dimension is rotated; or None
    eps,
    cos_sin_cache,  # [max_positions, 2 * HALF] float32
    position,
    tile,
    head_stride,
    out_head_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NUM_TILE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # 0 if every dimension is rotated
):
    """Norms each head if asked to, rotates pairs of dimensions and copies the others."""
    head = tile * NUM_TILE_HEADS + tl.arange(0, NUM_TILE_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_inside = (head < num_heads) & (pair < HALF)
    source, target = x + head * head_stride + pair, out + head * out_head_stride + pair
    first = tl.load(source, mask=is_inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_inside, other=0.0).to(tl.float32)
    # After the heads, which are on their way while the position is still waited for.
    angles = cos_sin_cache + position.to(tl.int64) * (2 * HALF) + pair
    cos, sin = tl.load(angles, mask=pair < HALF, other=0.0), tl.load(angles + HALF, mask=pair < HALF, other=0.0)
    if norm is not None:
        tl.static_assert(BLOCK_REST == 0)
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        root = tl.rsqrt(squares / HEAD_DIM + eps)
        is_pair = pair < HALF
        first = _scaled(first * root, norm + pair, is_pair, x.dtype.element_ty)
        second = _scaled(second * root, norm + HALF + pair, is_pair, x.dtype.element_ty)
    # What is stored in another type was of the type of `x` first, as it is where it is not stored at once.
    turned_first = (first * cos - second * sin).to(x.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(x.dtype.element_ty)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(target, _to_stored(turned_first, scale, head, num_heads, dtype), mask=is_inside)
    tl.store(target + HALF, _to_stored(turned_second, scale, head, num_heads, dtype), mask=is_inside)
    if BLOCK_REST > 0:
        store_heads(
            x, out, scale, tile, head_stride, out_head_stride, num_heads, 2 * HALF, HEAD_DIM, NUM_TILE_HEADS,
            BLOCK_REST,
        )  # fmt: skip


@triton.jit
def store_heads(
    x,  # [num_heads, HEAD_DIM] of a token, heads apart by `head_stride`
    out,  # [num_heads, HEAD_DIM], heads apart by `out_head_stride`
    scale,  # [num_heads] float32 that stored numbers are divided by, or None
    tile,
    head_stride,
    out_head_stride,
    num_heads,
    START: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_TILE_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Takes the dimensions from START on along as they are."""
    head = tile * NUM_TILE_HEADS + tl.arange(0, NUM_TILE_HEADS)[:, None]
    column = START + tl.arange(0, BLOCK_SIZE)[None, :]
    is_inside = (head < num_heads) & (column < HEAD_DIM)
    values = tl.load(x + head * head_stride + column, mask=is_inside, other=0.0)
    stored = _to_stored(values, scale, head, num_heads, out.dtype.element_ty)
    tl.store(out + head * out_head_stride + column, stored, mask=is_inside)


@triton.jit
def _scaled(normed, factors, is_inside, DTYPE: tl.constexpr):
    """`normed` times what lies at `factors`, rounded before and after as `rms_norm` does."""
    factor = tl.load(factors, mask=is_inside, other=0.0)
    return (normed.to(factor.dtype).to(tl.float32) * factor.to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit
def _to_stored(
    values,  # [num_tile_heads, size]
    scale,  # [num_heads] float32, or None
    head,  # [num_tile_heads, 1]
    num_heads,
    DTYPE: tl.constexpr,
):
    """As `float8_cache.to_stored` where there is a scale; else in the other type."""
    if scale is not None:
        divisor = tl.load(scale + head, mask=head < num_heads, other=1.0)
        values = tl.clamp(values.to(tl.float32) / divisor, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(DTYPE)
