"""Inner loops of linear layers on a GPU, for each format of the weight.

Each multiplies a tile of outputs by a tile of rows.

Weights stand on the left of the tensor cores' product and rows on the right, so that a tile of 64 outputs fills the
instruction for warp groups (wgmma) with 16 rows as well as with 128. All tiles therefore use one instruction and take
the inputs in one order, which is why a row's sum does not depend on how many rows there are.

Packed formats lie in chunks of inputs, so that what a tile reads at once is one run of memory.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from llmstack_kernels.linear.widening import widen_fp8, widen_int4, widen_int4_less_zero, widen_int8


@triton.jit
def tile_product(
    weight,  # as the functions below say
    scales,
    outs,  # [BLOCK_OUT], the outputs of the tile: rows of the weight
    row_starts,  # [BLOCK_ROWS], pointers to where rows of inputs start
    first,  # the first chunk of inputs
    last,  # the one after the last
    in_features,
    num_outs,
    FORMAT: tl.constexpr,
    HAS_TAIL: tl.constexpr,  # the last chunk of inputs is not full
    BLOCK_K: tl.constexpr,  # inputs of a chunk
    NUM_STAGES: tl.constexpr,
):
    """Sums [BLOCK_OUT, BLOCK_ROWS] in float32 over the chunks from `first` to `last`."""
    if FORMAT == "plain":
        return _plain(weight, outs, row_starts, first, last, in_features, HAS_TAIL, BLOCK_K, NUM_STAGES)
    elif FORMAT == "int4_zeros":
        return _int4_zeros(
            weight, scales, outs, row_starts, first, last, in_features, num_outs, HAS_TAIL, BLOCK_K, NUM_STAGES
        )
    elif FORMAT == "int4":
        return _int4(
            weight, scales, outs, row_starts, first, last, in_features, num_outs, HAS_TAIL, BLOCK_K, NUM_STAGES
        )
    else:
        return _bytes(
            weight, scales, outs, row_starts, first, last, in_features, num_outs, FORMAT, HAS_TAIL, BLOCK_K, NUM_STAGES
        )


@triton.jit
def _plain(
    weight,  # [num_outs, in_features]
    outs,
    row_starts,
    first,
    last,
    in_features,
    HAS_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    inputs = tl.arange(0, BLOCK_K)
    weights = weight + outs.to(tl.int64)[:, None] * in_features + inputs[None, :]
    sums = tl.zeros((outs.shape[0], row_starts.shape[0]), tl.float32)
    for chunk in tl.range(first, last, num_stages=NUM_STAGES):
        start = chunk * BLOCK_K
        if HAS_TAIL:
            left = tl.load(weights + start, mask=(start + inputs < in_features)[None, :], other=0.0)
        else:
            left = tl.load(weights + start)
        right = _load_rows(row_starts, start + inputs, in_features, HAS_TAIL)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    return sums


@triton.jit
def _bytes(
    weight,  # int16 [num_chunks, num_outs, BLOCK_K / 2]: pairs of integers, or of the bits of float8 e4m3
    scales,  # float32 [num_chunks, num_outs] of int8 and fp8_block; an fp8 output has one scale, left to the caller
    outs,
    row_starts,
    first,
    last,
    in_features,
    num_outs,
    FORMAT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_K // 2
    places = tl.arange(0, HALF)
    weights = weight + outs[:, None] * HALF + places[None, :]
    chunk_size = num_outs.to(tl.int64) * HALF
    sums = tl.zeros((outs.shape[0], row_starts.shape[0]), tl.float32)
    for chunk in tl.range(first, last, num_stages=NUM_STAGES):
        words = tl.load(weights + chunk * chunk_size)
        right0 = _load_rows(row_starts, chunk * BLOCK_K + places, in_features, HAS_TAIL)
        right1 = _load_rows(row_starts, chunk * BLOCK_K + HALF + places, in_features, HAS_TAIL)
        if FORMAT == "fp8":
            left0, left1 = widen_fp8(words, right0.dtype)
            sums = tl.dot(left0, right0, sums, input_precision="ieee")
            sums = tl.dot(left1, right1, sums, input_precision="ieee")
        elif FORMAT == "fp8_block":
            left0, left1 = widen_fp8(words, right0.dtype)
            scale = tl.load(scales + chunk * num_outs + outs)
            part = tl.dot(left0, right0, input_precision="ieee")
            sums += tl.dot(left1, right1, part, input_precision="ieee") * scale[:, None]
        else:
            # Integers are exact in the type of the rows; the scale enters where sums are float32.
            left0, left1 = widen_int8(words, right0.dtype)
            scale = tl.load(scales + chunk * num_outs + outs)
            part = tl.dot(left0, right0, input_precision="ieee")
            sums += tl.dot(left1, right1, part, input_precision="ieee") * scale[:, None]
    return sums


@triton.jit
def _int4(
    weight,  # int16 [num_chunks, num_outs, BLOCK_K / 4]: four integers each
    scales,  # int32 [num_chunks, 2, num_outs]: two of bfloat16 each
    outs,
    row_starts,
    first,
    last,
    in_features,
    num_outs,
    HAS_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = BLOCK_K // 4
    places = tl.arange(0, GROUP)
    weights = weight + outs[:, None] * GROUP + places[None, :]
    chunk_size = num_outs.to(tl.int64) * GROUP
    sums = tl.zeros((outs.shape[0], row_starts.shape[0]), tl.float32)
    for chunk in tl.range(first, last, num_stages=NUM_STAGES):
        words = tl.load(weights + chunk * chunk_size)
        own_scales = scales + chunk * 2 * num_outs + outs
        scales0, scales1 = tl.load(own_scales), tl.load(own_scales + num_outs)
        lefts = widen_int4(words, scales0[:, None], scales1[:, None], row_starts.dtype.element_ty)
        for group in tl.static_range(4):
            right = _load_rows(row_starts, chunk * BLOCK_K + group * GROUP + places, in_features, HAS_TAIL)
            sums = tl.dot(lefts[group], right, sums, input_precision="ieee")
    return sums


@triton.jit
def _int4_zeros(
    weight,  # int16 [num_chunks, num_outs, BLOCK_K / 4]: four numbers from 0 to 15 each
    scales,  # int32 [num_chunks, 5, num_outs]: the bits of four float32, and four zero points in a word
    outs,
    row_starts,
    first,
    last,
    in_features,
    num_outs,
    HAS_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    GROUP: tl.constexpr = BLOCK_K // 4
    places = tl.arange(0, GROUP)
    weights = weight + outs[:, None] * GROUP + places[None, :]
    chunk_size = num_outs.to(tl.int64) * GROUP
    sums = tl.zeros((outs.shape[0], row_starts.shape[0]), tl.float32)
    for chunk in tl.range(first, last, num_stages=NUM_STAGES):
        words = tl.load(weights + chunk * chunk_size)
        own_scales = scales + chunk * 5 * num_outs + outs
        zeros = tl.load(own_scales + 4 * num_outs)[:, None]
        for group in tl.static_range(4):
            # Differences are exact in the type of the rows; the scale enters where sums are float32.
            left = widen_int4_less_zero(words, zeros, group, row_starts.dtype.element_ty)
            scale = tl.load(own_scales + group * num_outs).to(tl.float32, bitcast=True)
            right = _load_rows(row_starts, chunk * BLOCK_K + group * GROUP + places, in_features, HAS_TAIL)
            sums += tl.dot(left, right, input_precision="ieee") * scale[:, None]
    return sums


@triton.jit
def _load_rows(row_starts, inputs, in_features, HAS_TAIL: tl.constexpr):
    pointers = row_starts[None, :] + inputs[:, None]
    if HAS_TAIL:
        return tl.load(pointers, mask=(inputs < in_features)[:, None], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def prefetch(weight, outs, first, in_features, num_outs, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """Loads the first chunks of a tile's weights into the L2 cache while the kernel before still runs."""
    if not cuda_capability_geq(9, 0):
        return
    NUM_WORDS: tl.constexpr = BLOCK_K // 4 if FORMAT == "int4" or FORMAT == "int4_zeros" else BLOCK_K // 2
    for chunk in tl.static_range(4):
        if FORMAT == "plain":
            inputs = tl.minimum((first + chunk) * BLOCK_K, in_features - 1)
            lines = weight + outs.to(tl.int64) * in_features + inputs
        else:
            known = tl.minimum(first + chunk, tl.cdiv(in_features, BLOCK_K) - 1)
            lines = weight + known.to(tl.int64) * num_outs * NUM_WORDS + outs * NUM_WORDS
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
