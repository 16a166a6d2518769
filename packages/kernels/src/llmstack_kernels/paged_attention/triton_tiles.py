"""The loop over tiles of keys and values, with an online softmax.

Decode and prefill kernels share it.

What a query gets out of a walk does not depend on the queries beside it: tiles begin at multiples of their size in the
row's context, and keys that a query does not see leave its running softmax as it was, to the bit. Multiplications that
end in an addition are spelled out as one: left to the compiler, loops with and without a mask could round otherwise.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

# Pointers that change with every step: kernels are not specialised for their alignment.
PER_STEP_POINTERS = ["query_start_loc", "seq_lens", "block_tables"]

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_queries(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    tokens,  # [ROWS]
    heads,  # [ROWS]
    is_inside,  # [ROWS]
    query_stride,
    HEAD_DIM: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
):
    """A tile of queries, in the type that products are computed in: [ROWS, HEAD_DIM padded with zeros]."""
    columns = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    addresses = query + tokens.to(tl.int64)[:, None] * query_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    own = tl.load(addresses, mask=is_inside[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    if IS_FLOAT8 and own.dtype == tl.bfloat16:
        # Eight bits fit float16 exactly, and get there in one instruction; queries keep all they have below 65504.
        own = own.to(tl.float16)
    return own


@triton.jit
def store_heads(target, places, is_inside, values, HEAD_DIM: tl.constexpr):
    """Write rows of `values` [ROWS, HEAD_DIM padded] to `places` [ROWS] of a target [..., HEAD_DIM], in its type."""
    columns = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    addresses = target + places[:, None] * HEAD_DIM + columns[None, :]
    is_stored = is_inside[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(addresses, values.to(target.dtype.element_ty), mask=is_stored)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A running softmax before the first key: maxima of scores [ROWS], sums of weights [ROWS], sums of values."""
    totals = tl.zeros([ROWS, triton.next_power_of_2(HEAD_DIM)], tl.float32)
    return tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), totals


@triton.jit
def sinks_seen(sinks, heads, to_exponent, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """A running softmax before the first key, where each head has a score without a value, or None has one."""
    maxima, sums, totals = nothing_seen(ROWS, HEAD_DIM)
    if sinks is not None:
        maxima = tl.load(sinks + heads) * _LOG2_E / to_exponent  # as scores are before they are exponents
        sums += 1.0
    return maxima, sums, totals


@triton.jit
def attend(
    softmax,  # as `nothing_seen` or an earlier call returned it
    queries,  # a tile of them [ROWS, HEAD_DIM padded], their positions [ROWS] or [1], their heads [ROWS]
    caches,  # of keys and values, each [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]; block table; stride; KV head
    span,  # positions: of the first key that any query sees, the first to walk over (a multiple of TILE), and the end
    scoring,  # `score_factors`, the soft cap or None, and ALiBi's slopes [num_heads] or None
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    IS_MASKED: tl.constexpr,  # unless every query sees every key to walk over, which are whole tiles
    IS_READ_ONCE: tl.constexpr,  # rather than by many programs
):
    """The running softmax after the keys of a span."""
    maxima, sums, totals = softmax
    own, query_positions, heads = queries
    key_cache, value_cache, block_table, block_stride, kv_head = caches
    low, start, end = span
    _, to_exponent, _, _ = scoring
    for position in range(start, end, TILE):
        positions = position + tl.arange(0, TILE)
        is_loaded = positions < end
        if WINDOW > 0:
            is_loaded = is_loaded & (positions >= low)
        unsigned = positions.to(tl.uint32)  # so that dividing them is shifting them
        if IS_MASKED:
            blocks = tl.load(block_table + unsigned // BLOCK_SIZE, mask=is_loaded, other=0)
        else:
            blocks = tl.load(block_table + unsigned // BLOCK_SIZE)
        offsets = blocks.to(tl.int64) * block_stride + (kv_head * BLOCK_SIZE + unsigned % BLOCK_SIZE) * HEAD_DIM
        keys = _load_rows(key_cache, offsets, is_loaded, HEAD_DIM, IS_MASKED, IS_READ_ONCE)
        values = _load_rows(value_cache, offsets, is_loaded, HEAD_DIM, IS_MASKED, IS_READ_ONCE)
        distances = positions[None, :] - query_positions[:, None]
        scores = _scores(own, keys.to(own.dtype), distances, heads, scoring)
        if IS_MASKED:
            is_seen = is_loaded[None, :] & (distances <= 0)
            if WINDOW > 0:
                is_seen = is_seen & (distances > -WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        maxima, sums, totals = softmax_step(scores, values.to(own.dtype), maxima, sums, totals, to_exponent)
    return maxima, sums, totals


@triton.jit
def _load_rows(cache, offsets, is_loaded, HEAD_DIM: tl.constexpr, IS_MASKED: tl.constexpr, IS_READ_ONCE: tl.constexpr):
    """Keys or values: [len(offsets), HEAD_DIM padded], with zeros for what is not loaded."""
    columns = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    addresses = cache + offsets[:, None] + columns[None, :]
    is_padded: tl.constexpr = triton.next_power_of_2(HEAD_DIM) != HEAD_DIM
    policy: tl.constexpr = "evict_first" if IS_READ_ONCE else ""
    if IS_MASKED or is_padded:
        is_inside = is_loaded[:, None] & (columns < HEAD_DIM)[None, :]
        return tl.load(addresses, mask=is_inside, other=0.0, eviction_policy=policy)
    return tl.load(addresses, eviction_policy=policy)


@triton.jit
def score_factors(scale, soft_cap, alibi_slopes, key_scale, kv_head):
    """The factors that make a score of a product, and an exponent of 2 of what `_scores` returns."""
    factor = scale
    if key_scale is not None:
        factor = scale * tl.load(key_scale + kv_head)
    if soft_cap is not None or alibi_slopes is not None:
        return factor, _LOG2_E
    return factor, factor * _LOG2_E


@triton.jit
def _scores(own, keys, distances, heads, scoring):
    """Scores; the mere products where nothing but the softmax uses them, whose subtraction multiplies at no cost."""
    factor, _, soft_cap, alibi_slopes = scoring
    scores = tl.dot(own, tl.trans(keys), input_precision="ieee")
    if soft_cap is not None or alibi_slopes is not None:
        scores = scores * factor
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows nor divides infinities.
        scores = soft_cap * (1 - 2 / (tl.exp2(scores / soft_cap * (2 * _LOG2_E)) + 1))
    if alibi_slopes is not None:
        scores = tl.fma(tl.load(alibi_slopes + heads)[:, None], distances.to(tl.float32), scores)
    return scores


@triton.jit
def softmax_step(scores, values, maxima, sums, totals, to_exponent):
    """The running softmax with a tile more."""
    higher = tl.maximum(maxima, tl.max(scores, 1))
    # Of a query that has seen no key yet: infinities must not be subtracted from each other.
    pivots = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(tl.fma(scores, to_exponent, -(pivots * to_exponent)[:, None]))
    kept = tl.exp2((maxima - pivots) * to_exponent)
    sums = sums * kept + tl.sum(weights, 1)
    totals = tl.dot(weights.to(values.dtype), values, totals * kept[:, None], input_precision="ieee")
    return higher, sums, totals
