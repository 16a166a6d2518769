"""Values that sampling kernels share: processed logits, weights, random numbers."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from llmstack_kernels.sample_tokens import state

NUM_WORDS = tl.constexpr(state.NUM_WORDS)
_TEMPERATURE = tl.constexpr(state.TEMPERATURE)
_TOP_K = tl.constexpr(state.TOP_K)
_TOP_P = tl.constexpr(state.TOP_P)
_MIN_P = tl.constexpr(state.MIN_P)
_SEED = tl.constexpr(state.SEED)
_MIN_TOKENS = tl.constexpr(state.MIN_TOKENS)
_REPETITION = tl.constexpr(state.REPETITION)
_FREQUENCY = tl.constexpr(state.FREQUENCY)
_PRESENCE = tl.constexpr(state.PRESENCE)
_NUM_ENDINGS = tl.constexpr(state.NUM_ENDINGS)
_ENDINGS = tl.constexpr(state.ENDINGS)
_LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST_EXPONENT = tl.constexpr(-87.0)  # weights below e to this power are 0
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


class Row(NamedTuple):
    """Addresses of a row's inputs."""

    logits: Any  # [vocab_size]
    words: Any  # [NUM_WORDS]
    num_known: Any
    """Tokens generated so far."""
    num_masked: Any
    """Number of ending tokens that are masked."""
    counts: Any  # [vocab_size]; None without penalties
    bitmask: Any  # [ceil(vocab_size / 32)]; None where nothing is masked
    vocab_size: Any


class Sharpness(NamedTuple):
    """The factors that make weights of values."""

    best: Any
    temperature: Any
    min_p: Any


@triton.jit
def num_masked(words, num_known):
    """The number of ending tokens that are masked, since the row is too short to end."""
    return tl.where(num_known < tl.load(words + _MIN_TOKENS), tl.load(words + _NUM_ENDINGS), 0).to(tl.int32)


@triton.jit
def temperature_of(row):
    return _float(row, _TEMPERATURE).to(tl.float32)


@triton.jit
def min_p_of(row):
    return _float(row, _MIN_P).to(tl.float32)


@triton.jit
def top_k_of(row):
    return tl.minimum(tl.load(row.words + _TOP_K), row.vocab_size).to(tl.int32)


@triton.jit
def top_p_of(row):
    return _float(row, _TOP_P)


@triton.jit
def _float(row, PLACE: tl.constexpr):
    return tl.load(row.words + PLACE).to(tl.float64, bitcast=True)


@triton.jit
def _is_penalised(row):
    return (_float(row, _REPETITION) != 1.0) | (_float(row, _FREQUENCY) != 0.0) | (_float(row, _PRESENCE) != 0.0)


@triton.jit
def load_values(row, columns, is_inside):
    """Logits that only temperature and the sets are still to be applied to; infinity where there is no number."""
    return values_of(row, load_logits(row, columns, is_inside), columns, is_inside)


@triton.jit
def load_logits(row, columns, is_inside):
    return tl.load(row.logits + columns, mask=is_inside, other=float("-inf"))


@triton.jit
def values_of(row, logits, columns, is_inside):
    """The values that `load_values` loads, from logits that are there already."""
    logits = logits.to(tl.float32)
    values = logits
    if row.bitmask is not None:
        bits = tl.load(row.bitmask + (columns >> 5), mask=is_inside, other=0)
        values = tl.where((bits >> (columns & 31)) & 1 != 0, values, float("-inf"))
    for place in range(row.num_masked):
        values = tl.where(columns == tl.load(row.words + _ENDINGS + place).to(tl.int32), float("-inf"), values)
    if row.counts is not None:  # noqa: SIM102, which is decided when the kernel is compiled
        if _is_penalised(row):
            values = _penalised(row, columns, is_inside, values)
    return tl.where(logits != logits, float("inf"), values)


@triton.jit
def _penalised(row, columns, is_inside, values):
    seen = tl.load(row.counts + columns, mask=is_inside, other=0)
    num_generated = (seen >> 1).to(tl.float32)
    repetition = _float(row, _REPETITION).to(tl.float32)
    scaled = tl.where(values > 0, values / repetition, values * repetition)
    subtracted = _float(row, _FREQUENCY).to(tl.float32) * num_generated
    subtracted += tl.where(num_generated > 0, _float(row, _PRESENCE).to(tl.float32), 0.0)
    return tl.where(seen != 0, scaled - subtracted, values)


@triton.jit
def weights_relative(values, best, temperature):
    """Probabilities relative to that of `best`, a number or a tensor; nearly 0 where they should be 0."""
    # Without the bound a low temperature would overflow.
    differences = tl.maximum(values - best, LOWEST_EXPONENT * temperature)
    return tl.exp2(differences * (_LOG2_E / temperature))


@triton.jit
def weights_of(values, sharpness):
    """Probabilities relative to the most likely token's, 0 below min-p."""
    weights = weights_relative(values, sharpness.best, sharpness.temperature)
    is_something = values - sharpness.best > LOWEST_EXPONENT * sharpness.temperature
    return tl.where(is_something & (weights >= sharpness.min_p), weights, 0.0)


@triton.jit
def uniform(row):
    """A number in [0, 1), float64: SplitMix64 over a counter that starts at the mixed seed."""
    seed = tl.load(row.words + _SEED).to(tl.uint64)
    counter = _mix(seed + _GOLDEN) + (row.num_known.to(tl.uint64) + 1) * _GOLDEN
    return (_mix(counter) >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _mix(values):
    values = (values ^ (values >> 30)) * _MIX_1
    values = (values ^ (values >> 27)) * _MIX_2
    return values ^ (values >> 31)


@triton.jit
def first_beyond(weights, target):
    """The first place whose cumulated weight exceeds the target, at most the one that completes the weights."""
    cumulative = tl.cumsum(weights.to(tl.float64), axis=0)
    found = tl.sum((cumulative <= target).to(tl.int32), axis=0)
    return tl.minimum(found, tl.sum((cumulative < tl.max(cumulative, axis=0)).to(tl.int32), axis=0))


@triton.jit
def count_token(row, num_outputs, token_id):
    """The token is generated from here on. `num_outputs`: Where the row's count stands."""
    tl.store(num_outputs, row.num_known + 1)
    if row.counts is not None:  # noqa: SIM102, which is decided when the kernel is compiled
        if _is_penalised(row):
            tl.store(row.counts + token_id, tl.load(row.counts + token_id) + 2)
