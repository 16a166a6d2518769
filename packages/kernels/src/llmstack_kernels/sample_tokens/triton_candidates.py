"""The most likely tokens of a row, from the maxima of its blocks."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from llmstack_kernels.sample_tokens.triton_values import (
    first_beyond,
    load_values,
    top_k_of,
    top_p_of,
    uniform,
    weights_of,
)

_MAX_RANKED = tl.constexpr(256)  # sets smaller than this, and those of a top-k up to it, are inverted by rank
_FEW = tl.constexpr(4)
_RANK_TILE = tl.constexpr(8)


@triton.jit
def in_order(values):
    """Integers in the order of floats."""
    bits = values.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def candidate_bound(
    row,
    sharpness,
    ordered,  # [NUM_BLOCKS], maxima of the blocks
    peaks,  # [NUM_BLOCKS], their weights
    floor,  # no token of the set is below it
    total,  # the weights of all tokens
):
    """A value, in order, that all tokens of the row's set reach, and not many others.

    It is `floor` where no better one is known; or it may turn out that the set is larger. Maxima of blocks are tokens
    of their own: as many tokens reach a bound, and as much mass, as there are and have such maxima.
    """
    top_k = top_k_of(row)
    is_nucleus = (top_k >= row.vocab_size) & (sharpness.min_p == 0.0)
    num_needed = tl.minimum(top_k, _MAX_RANKED)
    enough = tl.where(is_nucleus, (top_p_of(row) * total * (1.0 + 1e-5)).to(tl.float32), float("inf"))
    # A bound of mass is worth raising, since a nucleus may be a few tokens; one of their number is good enough soon.
    num_wanted = tl.where(is_nucleus, _FEW, num_needed * 5 // 4)
    low = floor.to(tl.int64)
    high = in_order(sharpness.best).to(tl.int64) + 1
    num_above = tl.sum((ordered >= floor).to(tl.int32), axis=0)
    # Larger sets, and all that min-p keeps, are complete or not found at all.
    is_searching = is_nucleus | (top_k <= _MAX_RANKED) & (top_k < row.vocab_size)
    while is_searching & (high - low > 1) & (num_above > num_wanted):
        middle = (low + high) >> 1
        is_above = ordered >= middle.to(tl.int32)
        num_reached = tl.sum(is_above.to(tl.int32), axis=0)
        mass = tl.sum(tl.where(is_above, peaks, 0.0), axis=0)
        is_bound = (num_reached >= num_needed) | (mass >= enough)
        low = tl.where(is_bound, middle, low)
        high = tl.where(is_bound, high, middle)
        num_above = tl.where(is_bound, num_reached, num_above)
        num_wanted = tl.where(is_bound, tl.where(mass >= enough, _FEW, num_needed * 5 // 4), num_wanted)
    return low.to(tl.int32)


@triton.jit
def may_suffice(row, sharpness, masses, is_chosen, total):
    """False where the chosen blocks as a whole do not have the mass of the row's nucleus."""
    is_nucleus = (top_k_of(row) >= row.vocab_size) & (sharpness.min_p == 0.0)
    mass = tl.sum(tl.where(is_chosen, masses, 0.0), axis=0)
    return (is_nucleus == 0) | (mass >= top_p_of(row) * total * (1.0 - 1e-5))


@triton.jit
def gather(
    row,
    is_chosen,  # [NUM_BLOCKS]
    bound,
    chosen_blocks,  # [num_blocks], scratch
    candidates,  # [NUM_CANDIDATES], out
    candidate_ids,  # [NUM_CANDIDATES], out
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):
    """Stores the first tokens of the chosen blocks that reach the bound, by id; returns how many reach it."""
    num_chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
    places = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(chosen_blocks + places, tl.arange(0, NUM_BLOCKS), mask=is_chosen)
    tl.debug_barrier()
    # Each chosen block has a candidate: more of them than there is room need not be read.
    num_read = tl.where(num_chosen > NUM_CANDIDATES, 0, num_chosen)
    num_found = num_chosen - num_read
    for start in range(0, num_read, TILE_BLOCKS):
        tile = start + tl.arange(0, TILE_BLOCKS)
        block = tl.load(chosen_blocks + tile, mask=tile < num_chosen, other=0)
        columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        is_inside = (tile < num_chosen)[:, None] & (columns < row.vocab_size)
        values = load_values(row, columns, is_inside)
        is_candidate = (is_inside & (in_order(values) >= bound)).to(tl.int32)
        num_in_block = tl.sum(is_candidate, axis=1)
        before = num_found + tl.cumsum(num_in_block, axis=0) - num_in_block
        place = before[:, None] + tl.cumsum(is_candidate, axis=1) - 1
        is_stored = (is_candidate != 0) & (place < NUM_CANDIDATES)
        tl.store(candidates + place, values, mask=is_stored)
        tl.store(candidate_ids + place, columns, mask=is_stored)
        num_found += tl.sum(num_in_block, axis=0)
    tl.debug_barrier()
    return num_found


@triton.jit
def draw_candidate(
    row,
    sharpness,
    candidates,  # [2, NUM_CANDIDATES]: values by id, and scratch
    candidate_ids,  # [2, NUM_CANDIDATES]
    num_candidates,
    total,
    is_complete,
    NUM_CANDIDATES: tl.constexpr,
):
    """The token drawn, and whether the candidates suffice to tell.

    `is_complete`: The candidates are all tokens that have a weight.
    """
    places = tl.arange(0, NUM_CANDIDATES)
    is_inside = places < num_candidates
    values = tl.load(candidates + places, mask=is_inside, other=float("-inf"))
    token_ids = tl.load(candidate_ids + places, mask=is_inside, other=0)
    weights = tl.where(is_inside, weights_of(values, sharpness), 0.0)
    ranks = _ranks(candidates, values, num_candidates, NUM_CANDIDATES)
    tl.store(candidates + NUM_CANDIDATES + ranks, weights, mask=is_inside)
    tl.store(candidate_ids + NUM_CANDIDATES + ranks, token_ids, mask=is_inside)
    tl.debug_barrier()
    ranked = tl.load(candidates + NUM_CANDIDATES + places, mask=is_inside, other=0.0)
    ranked_ids = tl.load(candidate_ids + NUM_CANDIDATES + places, mask=is_inside, other=0)
    top_k = top_k_of(row)
    is_small = (top_k <= _MAX_RANKED) & (top_k < row.vocab_size)
    is_nucleus = (top_k >= row.vocab_size) & (top_p_of(row) < 1.0)
    # What top-p is a share of: the top-k set, or all tokens.
    mass = tl.sum(tl.where(places < top_k, ranked, 0.0).to(tl.float64), axis=0)
    mass = tl.where(is_nucleus & (is_complete == 0), total, mass)
    num_kept = tl.minimum(_num_kept(ranked, num_candidates, top_p_of(row) * mass, top_p_of(row)), top_k)
    is_short = is_nucleus & (num_kept < tl.minimum(_MAX_RANKED, row.vocab_size))
    is_settled = is_complete | is_small | (is_short & (num_kept <= num_candidates))
    is_ranked = is_small | is_short
    drawn = tl.where(tl.where(is_ranked, places, ranks) < num_kept, tl.where(is_ranked, ranked, weights), 0.0)
    chosen = first_beyond(drawn, uniform(row) * tl.sum(drawn.to(tl.float64), axis=0))
    drawn_ids = tl.where(is_ranked, ranked_ids, token_ids)
    return tl.sum(tl.where(places == chosen, drawn_ids, 0), axis=0), is_settled


@triton.jit
def _num_kept(ranked, num_candidates, target, top_p):
    """Size of the smallest set that reaches the target; one more than there are if none does."""
    cumulative = tl.cumsum(ranked.to(tl.float64), axis=0)
    places = tl.arange(0, ranked.shape[0])
    num_before = tl.sum(((places < num_candidates) & (cumulative < target)).to(tl.int32), axis=0)
    return tl.where(top_p < 1.0, num_before + 1, (1 << 31) - 1)


@triton.jit
def _ranks(candidates, values, num_candidates, NUM_CANDIDATES: tl.constexpr):
    """The number of candidates before each: larger ones, and equal ones of lower ids."""
    places = tl.arange(0, NUM_CANDIDATES)
    ranks = tl.zeros((NUM_CANDIDATES,), dtype=tl.int32)
    for start in range(0, num_candidates, _RANK_TILE):
        tile = start + tl.arange(0, _RANK_TILE)
        others = tl.load(candidates + tile, mask=tile < num_candidates, other=float("-inf"))
        is_equal = (others[None, :] == values[:, None]) & (tile[None, :] < places[:, None])
        ranks += tl.sum(((others[None, :] > values[:, None]) | is_equal).to(tl.int32), axis=1)
    return ranks
