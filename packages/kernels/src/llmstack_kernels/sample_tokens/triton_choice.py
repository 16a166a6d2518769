"""The choice of a row's token from the totals of its blocks."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.sample_tokens.triton_candidates import (
    candidate_bound,
    draw_candidate,
    gather,
    in_order,
    may_suffice,
)
from llmstack_kernels.sample_tokens.triton_values import (
    LOWEST_EXPONENT,
    NUM_WORDS,
    Row,
    Sharpness,
    count_token,
    first_beyond,
    load_values,
    min_p_of,
    num_masked,
    temperature_of,
    top_k_of,
    top_p_of,
    uniform,
    weights_of,
    weights_relative,
)

_MAX_INT = tl.constexpr((1 << 31) - 1)


@triton.jit
def block_kernel(
    logits,  # [num_rows, vocab_size]
    logits_stride,
    rows,  # [num_rows]
    parameters,  # [*, NUM_WORDS]
    num_outputs,  # [*]
    counts,  # [*, vocab_size], or None
    bitmask,  # [num_rows, bitmask_words], or None
    bitmask_words,
    maxima,  # [num_rows, num_blocks], out
    sums,  # [num_rows, num_blocks], out, with HAS_RANDOM: of weights relative to the block's largest
    vocab_size,
    num_blocks,
    HAS_RANDOM: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    index = tl.program_id(1).to(tl.int64)
    wait_for_previous()
    persistent = tl.load(rows + index).to(tl.int64)
    if counts is not None:
        counts += persistent * vocab_size
    if bitmask is not None:
        bitmask += index * bitmask_words
    words, known = parameters + persistent * NUM_WORDS, tl.load(num_outputs + persistent)
    row = Row(logits + index * logits_stride, words, known, num_masked(words, known), counts, bitmask, vocab_size)
    temperature = temperature_of(row)
    for tile in range(NUM_TILES):
        blocks = (tl.program_id(0) * NUM_TILES + tile) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
        columns = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = load_values(row, columns, columns < vocab_size)
        block_maxima = tl.max(values, axis=1)
        tl.store(maxima + index * num_blocks + blocks, block_maxima, mask=blocks < num_blocks)
        if HAS_RANDOM:  # noqa: SIM102, which is decided when the kernel is compiled
            if temperature > 0.0:
                # Of a block without tokens the sum does not matter, but must be a number.
                base = tl.where(tl.abs(block_maxima) < float("inf"), block_maxima, 0.0)
                weights = weights_relative(values, base[:, None], temperature)
                tl.store(sums + index * num_blocks + blocks, tl.sum(weights, axis=1), mask=blocks < num_blocks)


@triton.jit
def choice_kernel(
    logits,  # [num_rows, vocab_size]
    logits_stride,
    rows,  # [num_rows]
    parameters,  # [*, NUM_WORDS]
    num_outputs,  # [*]
    counts,  # [*, vocab_size], or None
    bitmask,  # [num_rows, bitmask_words], or None
    bitmask_words,
    maxima,  # [num_rows, num_blocks]
    sums,  # [num_rows, num_blocks], with HAS_RANDOM
    chosen_blocks,  # [num_rows, num_blocks], scratch, with HAS_RANDOM
    candidates,  # [num_rows, 2, NUM_CANDIDATES], scratch, with HAS_RANDOM: values by id, weights by rank
    candidate_ids,  # [num_rows, 2, NUM_CANDIDATES], scratch, with HAS_RANDOM
    largest,  # [num_rows], out, with HAS_RANDOM: the largest value
    totals,  # [num_rows], out, with HAS_RANDOM: sums of all weights of rows to be searched whole; negative otherwise
    token_ids,  # [num_rows], out
    is_good,  # [num_rows], out
    vocab_size,
    num_blocks,
    HAS_RANDOM: tl.constexpr,
    IS_COUNTING: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # num_blocks, rounded up to a power of two
    NUM_CANDIDATES: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    wait_for_previous()
    persistent = tl.load(rows + index).to(tl.int64)
    if counts is not None:
        counts += persistent * vocab_size
    if bitmask is not None:
        bitmask += index * bitmask_words
    words, known = parameters + persistent * NUM_WORDS, tl.load(num_outputs + persistent)
    row = Row(logits + index * logits_stride, words, known, num_masked(words, known), counts, bitmask, vocab_size)
    blocks = tl.arange(0, NUM_BLOCKS)
    is_block = blocks < num_blocks
    block_maxima = tl.load(maxima + index * num_blocks + blocks, mask=is_block, other=float("-inf"))
    best = tl.max(block_maxima, axis=0)
    is_good_row = tl.abs(best) < float("inf")
    token_id = tl.where(is_good_row, _argmax(row, block_maxima, best, BLOCK, NUM_BLOCKS), 0)
    total = tl.full((), -1.0, tl.float64)
    if HAS_RANDOM:
        if is_good_row & (temperature_of(row) > 0.0):
            block_sums = tl.load(sums + index * num_blocks + blocks, mask=is_block, other=0.0)
            token_id, total = _draw(
                row, Sharpness(best, temperature_of(row), min_p_of(row)), block_maxima, block_sums,
                chosen_blocks + index * num_blocks,
                candidates + index * 2 * NUM_CANDIDATES,
                candidate_ids + index * 2 * NUM_CANDIDATES,
                BLOCK, TILE_BLOCKS, NUM_BLOCKS, NUM_CANDIDATES,
            )  # fmt: skip
        tl.store(largest + index, best)
        tl.store(totals + index, total)
    if total < 0.0:
        tl.store(token_ids + index, token_id.to(tl.int64))
        tl.store(is_good + index, is_good_row)
        if IS_COUNTING:
            count_token(row, num_outputs + persistent, token_id)


@triton.jit
def _argmax(row, block_maxima, best, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    block = tl.min(tl.where(block_maxima == best, tl.arange(0, NUM_BLOCKS), NUM_BLOCKS - 1), axis=0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = load_values(row, columns, columns < row.vocab_size)
    return tl.min(tl.where(values == best, columns, _MAX_INT), axis=0)


@triton.jit
def _draw(
    row,
    sharpness,
    block_maxima,  # [NUM_BLOCKS]
    block_sums,  # [NUM_BLOCKS]
    chosen_blocks,  # [num_blocks], scratch
    candidates,  # [2, NUM_CANDIDATES], scratch
    candidate_ids,  # [2, NUM_CANDIDATES], scratch
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):
    """A token and -1, or the sum of all weights where the whole row must be searched."""
    top_k = top_k_of(row)
    unbounded = Sharpness(sharpness.best, sharpness.temperature, 0.0)
    peaks = weights_of(block_maxima, unbounded)
    masses = peaks.to(tl.float64) * block_sums
    total = tl.sum(masses, axis=0)
    is_settled = True
    if (top_k >= row.vocab_size) & (top_p_of(row) >= 1.0) & (sharpness.min_p == 0.0):
        token_id = _draw_from_all(row, unbounded, masses, total, BLOCK, NUM_BLOCKS)
    else:
        floor = in_order(_lowest(sharpness))
        ordered = in_order(block_maxima)
        bound = candidate_bound(row, sharpness, ordered, peaks, floor, total)
        num_candidates = NUM_CANDIDATES + 1
        if may_suffice(row, sharpness, masses, ordered >= bound, total):
            num_candidates = gather(
                row, ordered >= bound, bound, chosen_blocks, candidates, candidate_ids,
                BLOCK, TILE_BLOCKS, NUM_BLOCKS, NUM_CANDIDATES,
            )  # fmt: skip
        token_id = 0
        is_settled = False
        if num_candidates <= NUM_CANDIDATES:
            token_id, is_settled = draw_candidate(
                row, sharpness, candidates, candidate_ids, num_candidates, total, bound == floor, NUM_CANDIDATES
            )
    return token_id, tl.where(is_settled, -1.0, total)


@triton.jit
def _lowest(sharpness):
    """A value that no token of the set is below. Rounding must leave none out; the weights decide again later."""
    exponent = LOWEST_EXPONENT + 0.0 * sharpness.min_p
    if sharpness.min_p > 0.0:
        exponent = tl.maximum(exponent, tl.log(sharpness.min_p) - 1e-3)
    return sharpness.best + exponent * sharpness.temperature - tl.abs(sharpness.best) * 3e-7


@triton.jit
def _draw_from_all(row, sharpness, masses, total, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Inverts the distribution over the blocks, then in one of them."""
    target = uniform(row) * total
    block = first_beyond(masses, target)
    before = tl.sum(tl.where(tl.arange(0, NUM_BLOCKS) < block, masses, 0.0), axis=0)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    weights = weights_of(load_values(row, columns, columns < row.vocab_size), sharpness)
    return block * BLOCK + first_beyond(weights, target - before)
