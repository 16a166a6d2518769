"""The choice of a row's token from a large set, in a few passes without sorting."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.sample_tokens.triton_values import (
    NUM_WORDS,
    Row,
    Sharpness,
    count_token,
    load_logits,
    min_p_of,
    num_masked,
    temperature_of,
    top_k_of,
    top_p_of,
    uniform,
    values_of,
    weights_of,
)

_NUM_PROBES = tl.constexpr(4)
_LARGEST = tl.constexpr(0x3F800000)  # the bits of the largest weight, 1
_BINADE = tl.constexpr(1 << 23)  # as many floats as there are from one power of two to the next


@triton.jit
def search_kernel(
    logits,  # [num_rows, vocab_size]
    logits_stride,
    rows,  # [num_rows]
    parameters,  # [*, NUM_WORDS]
    num_outputs,  # [*]
    counts,  # [*, vocab_size], or None
    bitmask,  # [num_rows, bitmask_words], or None
    bitmask_words,
    largest,  # [num_rows]
    totals,  # [num_rows], sums of all weights, min-p aside; negative where there is nothing to do
    candidates,  # [num_rows, 2, NUM_CANDIDATES], scratch
    token_ids,  # [num_rows], out
    is_good,  # [num_rows], out
    vocab_size,
    IS_COUNTING: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    wait_for_previous()
    total = tl.load(totals + index)
    if total >= 0.0:
        persistent = tl.load(rows + index).to(tl.int64)
        if counts is not None:
            counts += persistent * vocab_size
        if bitmask is not None:
            bitmask += index * bitmask_words
        words, known = parameters + persistent * NUM_WORDS, tl.load(num_outputs + persistent)
        row = Row(logits + index * logits_stride, words, known, num_masked(words, known), counts, bitmask, vocab_size)
        sharpness = Sharpness(tl.load(largest + index), temperature_of(row), min_p_of(row))
        candidates += index * 2 * NUM_CANDIDATES
        threshold, num_equal, mass = _set(row, sharpness, candidates, total, NUM_CANDIDATES, TILE)
        token_id = _draw(row, sharpness, threshold, num_equal, mass, TILE // 2)
        tl.store(token_ids + index, token_id.to(tl.int64))
        tl.store(is_good + index, token_id >= 0)
        if IS_COUNTING:
            count_token(row, num_outputs + persistent, token_id)


@triton.jit
def _set(row, sharpness, candidates, total, NUM_CANDIDATES: tl.constexpr, TILE: tl.constexpr):
    """The row's set: a weight, as bits; how many tokens of that weight are in it beside all heavier ones; its mass."""
    threshold = 0
    num_equal = row.vocab_size
    mass = total
    top_k, top_p = top_k_of(row), top_p_of(row)
    if top_k < row.vocab_size:
        num_tokens = row.vocab_size.to(tl.float64)
        threshold, num_above = _search(
            row, sharpness, candidates, threshold, num_tokens, top_k.to(tl.float64), True, NUM_CANDIDATES, TILE
        )
        num_equal = top_k - num_above.to(tl.int32)
    if (top_k < row.vocab_size) | (sharpness.min_p > 0.0):
        mass = _mass_above(row, sharpness, threshold, TILE) + _mass_equal(threshold, num_equal)
    if top_p < 1.0:
        target = top_p * mass
        # All tokens lighter than this, were there only such, would not make up what top-p leaves out.
        lightest = ((mass - target) * 0.999 / row.vocab_size).to(tl.float32).to(tl.int32, bitcast=True)
        low = tl.maximum(lightest, threshold)
        found, mass_above = _search(row, sharpness, candidates, low, mass, target, False, NUM_CANDIDATES, TILE)
        num_missing = tl.ceil((target - mass_above) / tl.maximum(_mass_equal(found, 1), 1e-40))
        num_missing = tl.maximum(tl.minimum(num_missing, row.vocab_size), 1.0).to(tl.int32)
        num_equal = tl.where(found == threshold, tl.minimum(num_missing, num_equal), num_missing)
        threshold = found
        mass = mass_above + _mass_equal(threshold, num_equal)
    return threshold, num_equal, mass


@triton.jit
def _mass_equal(threshold, num_equal):
    """The weight of that many tokens, of which each has the weight with these bits."""
    return threshold.to(tl.float32, bitcast=True).to(tl.float64) * num_equal


@triton.jit
def _load_tile(row, start, TILE: tl.constexpr):
    columns = start + tl.arange(0, TILE)
    return load_logits(row, columns, columns < row.vocab_size)


@triton.jit
def _weights(row, sharpness, logits, start, TILE: tl.constexpr):
    """The weights of a tile of logits."""
    columns = start + tl.arange(0, TILE)
    return weights_of(values_of(row, logits, columns, columns < row.vocab_size), sharpness)


@triton.jit
def _search(
    row,
    sharpness,
    candidates,  # [NUM_CANDIDATES], scratch
    low,  # a weight that enough tokens reach
    amount_low,  # at least what reaches it
    target,
    IS_COUNT: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest weight, as bits, such that tokens of the target amount reach it, and the amount above it.

    The amount is the tokens' number, or their mass. Probes narrow the weight down until there are so few tokens in
    between that they can be gathered.
    """
    high = low * 0 + _LARGEST + 1
    amount_high = target * 0.0
    is_even = True
    while (high - low > 1) & (_max_num_between(low, amount_low - amount_high, IS_COUNT) > NUM_CANDIDATES * 7 // 8):
        probes = _probes(low, high, (amount_low - target) / (amount_low - amount_high), is_even)
        reached = _amounts_reaching(row, sharpness, probes, IS_COUNT, TILE)
        is_reached = reached >= target
        width = high - low
        low = tl.maximum(low, tl.max(tl.where(is_reached, probes, 0), axis=0))
        high = tl.minimum(high, tl.min(tl.where(is_reached, _LARGEST + 1, probes), axis=0))
        amount_low = tl.minimum(amount_low, tl.min(tl.where(is_reached, reached, amount_low), axis=0))
        amount_high = tl.maximum(amount_high, tl.max(tl.where(is_reached, amount_high, reached), axis=0))
        # Amounts are about linear in the bits within one power of two; where a guess was no good, none follows.
        is_even = (high - low > _BINADE) | (high - low > width // 4)
    if high - low > 1:
        num_between = _gather_between(row, sharpness, candidates, low, high, NUM_CANDIDATES, TILE)
        low, amount_high = _bisect(candidates, num_between, low, high, amount_high, target, IS_COUNT, NUM_CANDIDATES)
    return low, amount_high


@triton.jit
def _max_num_between(low, amount, IS_COUNT: tl.constexpr):
    """Each token in between has the lower weight at least."""
    if not IS_COUNT:
        amount /= tl.maximum(_mass_equal(low, 1), 1e-40)
    return amount


@triton.jit
def _probes(low, high, share, is_even):
    """Weights between the two, ascending: evenly spread, or close around the one at the share of the way."""
    places = tl.arange(0, _NUM_PROBES)
    half = _NUM_PROBES // 2
    width = (high - low).to(tl.int64)
    even = low + width * (places + 1) // (_NUM_PROBES + 1)
    # A 16th and a 256th of the width, on either side.
    distance = width >> (4 * tl.where(places < half, places + 1, _NUM_PROBES - places))
    guess = low + (tl.maximum(tl.minimum(share, 1.0), 0.0) * width.to(tl.float64)).to(tl.int64)
    close = tl.where(places < half, guess - distance, guess + distance + 1)
    probes = tl.where(is_even, even, close)
    return tl.maximum(tl.minimum(probes, high - 1), low + 1).to(tl.int32)


@triton.jit
def _amounts_reaching(row, sharpness, probes, IS_COUNT: tl.constexpr, TILE: tl.constexpr):
    """The number of tokens that reach each probe, or their mass, in one pass over the row: float64 [_NUM_PROBES]."""
    sums = tl.zeros((_NUM_PROBES, TILE), dtype=tl.float32)
    # Two tiles are on their way while one is worked on, here and below.
    logits, following = _load_tile(row, 0, TILE), _load_tile(row, TILE, TILE)
    for start in range(0, row.vocab_size, TILE):
        weights = _weights(row, sharpness, logits, start, TILE)
        logits, following = following, _load_tile(row, start + 2 * TILE, TILE)
        bits = weights.to(tl.int32, bitcast=True)
        amounts = weights * 0.0 + 1.0 if IS_COUNT else weights
        sums += tl.where(bits[None, :] >= probes[:, None], amounts[None, :], 0.0)
    return tl.sum(sums.to(tl.float64), axis=1)


@triton.jit
def _gather_between(row, sharpness, candidates, low, high, NUM_CANDIDATES: tl.constexpr, TILE: tl.constexpr):
    """Stores the weights from `low` to before `high`; how many there are."""
    num_found = 0
    logits, following = _load_tile(row, 0, TILE), _load_tile(row, TILE, TILE)
    for start in range(0, row.vocab_size, TILE):
        weights = _weights(row, sharpness, logits, start, TILE)
        logits, following = following, _load_tile(row, start + 2 * TILE, TILE)
        bits = weights.to(tl.int32, bitcast=True)
        is_between = ((bits >= low) & (bits < high)).to(tl.int32)
        num_in_tile = tl.sum(is_between, axis=0)
        if num_in_tile > 0:
            places = num_found + tl.cumsum(is_between, axis=0) - 1
            tl.store(candidates + places, weights, mask=(is_between != 0) & (places < NUM_CANDIDATES))
        num_found += num_in_tile
    tl.debug_barrier()
    return tl.minimum(num_found, NUM_CANDIDATES)


@triton.jit
def _bisect(
    candidates, num_between, low, high, amount_high, target, IS_COUNT: tl.constexpr, NUM_CANDIDATES: tl.constexpr
):
    """The result of `_search`, from the weights in between."""
    places = tl.arange(0, NUM_CANDIDATES)
    weights = tl.load(candidates + places, mask=places < num_between, other=0.0)
    bits = tl.where(places < num_between, weights.to(tl.int32, bitcast=True), -1)
    amounts = (weights * 0.0 + 1.0 if IS_COUNT else weights).to(tl.float64)
    while high - low > 1:
        middle = low + (high - low) // 2
        is_reached = amount_high + tl.sum(tl.where(bits >= middle, amounts, 0.0), axis=0) >= target
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low, amount_high + tl.sum(tl.where(bits > low, amounts, 0.0), axis=0)


@triton.jit
def _mass_above(row, sharpness, threshold, TILE: tl.constexpr):
    sums = tl.zeros((TILE,), dtype=tl.float32)
    logits, following = _load_tile(row, 0, TILE), _load_tile(row, TILE, TILE)
    for start in range(0, row.vocab_size, TILE):
        weights = _weights(row, sharpness, logits, start, TILE)
        logits, following = following, _load_tile(row, start + 2 * TILE, TILE)
        sums += tl.where(weights.to(tl.int32, bitcast=True) > threshold, weights, 0.0)
    return tl.sum(sums.to(tl.float64), axis=0)


@triton.jit
def _draw(row, sharpness, threshold, num_equal, mass, TILE: tl.constexpr):
    """Inverts the distribution in the order of ids; reads up to the tile that holds the token."""
    target = uniform(row) * mass
    before = mass * 0.0
    num_seen = 0
    last = num_seen - 1  # the last token of the set so far
    token_id = last
    start = 0
    logits, following = _load_tile(row, 0, TILE), _load_tile(row, TILE, TILE)
    while (start < row.vocab_size) & (token_id < 0):
        columns = start + tl.arange(0, TILE)
        weights = _weights(row, sharpness, logits, start, TILE)
        logits, following = following, _load_tile(row, start + 2 * TILE, TILE)
        bits = weights.to(tl.int32, bitcast=True)
        is_equal = (bits == threshold).to(tl.int32)
        is_early = num_seen + tl.cumsum(is_equal, axis=0) <= num_equal
        weights = tl.where((bits > threshold) | ((is_equal != 0) & is_early), weights, 0.0)
        cumulative = before + tl.cumsum(weights.to(tl.float64), axis=0)
        is_beyond = (cumulative > target) & (weights > 0.0)
        first = tl.min(tl.where(is_beyond, columns, row.vocab_size), axis=0)
        token_id = tl.where(first < row.vocab_size, first, -1)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, columns, -1), axis=0))
        before += tl.sum(weights.to(tl.float64), axis=0)
        num_seen += tl.sum(is_equal, axis=0)
        start += TILE
    # Rounding may have set the target above all there is.
    return tl.where(token_id < 0, last, token_id)
