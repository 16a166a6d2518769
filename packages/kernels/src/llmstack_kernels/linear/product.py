"""Inner loops of linear layers on a GPU: for plain weights, and for packed ones.

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

from llmstack_kernels.linear.widening import numbers_of_word, unpack_chunk


@triton.jit
def tile_product(
    weight,  # plain: [num_outs, in_features]; else int16 [num_chunks, num_outs, BLOCK_K / numbers of a word]
    scales,  # see `unpack_chunk`
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
    else:
        NUM_PARTS: tl.constexpr = numbers_of_word(FORMAT)
        PART: tl.constexpr = BLOCK_K // NUM_PARTS
        places = tl.arange(0, PART)
        weights = weight + outs[:, None] * PART + places[None, :]
        chunk_size = num_outs.to(tl.int64) * PART
        sums = tl.zeros((outs.shape[0], row_starts.shape[0]), tl.float32)
        for chunk in tl.range(first, last, num_stages=NUM_STAGES):
            words = tl.load(weights + chunk * chunk_size)
            lefts, factors = unpack_chunk(words, scales, chunk, outs, num_outs, FORMAT, row_starts.dtype.element_ty)
            for part in tl.static_range(NUM_PARTS):
                right = _load_rows(row_starts, chunk * BLOCK_K + part * PART + places, in_features, HAS_TAIL)
                if FORMAT == "fp8" or FORMAT == "int4":  # the caller multiplies by the scale, or it is in the weight
                    sums = tl.dot(lefts[part], right, sums, input_precision="ieee")
                elif NUM_PARTS == 4:
                    sums += tl.dot(lefts[part], right, input_precision="ieee") * factors[part][:, None]
                elif part == 0:
                    half = tl.dot(lefts[part], right, input_precision="ieee")
                else:  # both parts have one scale
                    product = tl.dot(lefts[part], right, half, input_precision="ieee")  # type: ignore[possibly-undefined]
                    sums += product * factors[part][:, None]
        return sums


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
    NUM_WORDS: tl.constexpr = BLOCK_K // numbers_of_word(FORMAT)
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
