"""The gated delta rule on a GPU: some columns of a head's matrix per program.

A program takes the tokens of a row one by one and keeps its columns in registers, so a prompt's cut changes no bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.gated_delta_rule import DeltaRuleInputs
from llmstack_kernels.launch import launch
from llmstack_kernels.state_rows import StateRows

_COLUMNS = 32
"""Of a matrix per program: 128 rows of them are 32 registers of each thread of four warps."""


@triton.jit
def _log_decay(shifted, speed, lowest, IS_BOUNDED: tl.constexpr):
    if IS_BOUNDED:
        found = lowest * _sigmoid(speed * shifted)
    else:
        found = -speed * tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
    return found


@triton.jit
def _decay_places(head, key, key_dim, HAS_ROW_DECAYS: tl.constexpr):
    """The places of a head's decays: one, or a column for the rows of its matrix."""
    if HAS_ROW_DECAYS:
        place = (head * key_dim + key)[:, None]
        is_decay = (key < key_dim)[:, None]
    else:
        place = head + tl.zeros((1, 1), tl.int32)
        is_decay = place >= 0
    return place, is_decay


@triton.jit
def _load(line, place, is_inside):
    return tl.load(line + place, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gated_delta_rule_kernel(
    mixed,  # [num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim]
    decays,  # [num_tokens, num_heads, or times key_dim]
    rates,  # [num_tokens, num_heads]
    log_decay,  # [num_heads] float32
    decay_bias,  # [num_heads, or times key_dim] float32
    matrices,  # [num_blocks, num_heads, key_dim, value_dim] float32
    starts,  # [num_rows + 1] int32
    sources,  # [num_rows] int64
    targets,  # [num_rows] int64
    num_known,  # [num_rows] int64
    out,  # [num_tokens, num_heads * value_dim]
    mixed_stride,
    decays_stride,
    rates_stride,
    matrices_stride,
    num_key_heads,
    num_heads,
    key_dim,
    value_dim,
    scale,
    rate_scale,
    lowest,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    IS_TILED: tl.constexpr,
    HAS_ROW_DECAYS: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    key = tl.arange(0, NUM_ROWS)
    column = tl.program_id(2) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_key, is_column = key < key_dim, column < value_dim
    is_inside = is_key[:, None] & is_column[None, :]
    place = (head * key_dim + key[:, None]) * value_dim + column[None, :]
    state = _load(matrices + tl.load(sources + row) * matrices_stride, place, is_inside)
    target = matrices + tl.load(targets + row) * matrices_stride + place
    start, end, known = tl.load(starts + row), tl.load(starts + row + 1), tl.load(num_known + row)
    decay_place, is_decay = _decay_places(head, key, key_dim, HAS_ROW_DECAYS)
    speed, bias = tl.exp(tl.load(log_decay + head)), _load(decay_bias, decay_place, is_decay)
    num_keys = num_key_heads * key_dim
    query_place = (head % num_key_heads if IS_TILED else head // (num_heads // num_key_heads)) * key_dim + key
    tl.store(target, state, mask=is_inside & (known == 0))
    token = start
    while token < end:  # the interpreter takes no loaded number as the end of a range
        own = mixed + token.to(tl.int64) * mixed_stride
        q, k = _load(own, query_place, is_key), _load(own + num_keys, query_place, is_key)
        v = _load(own + 2 * num_keys + head * value_dim, column, is_column)
        q *= scale * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        shifted = _load(decays + token.to(tl.int64) * decays_stride, decay_place, is_decay) + bias
        rate = rate_scale * _sigmoid(tl.load(rates + token.to(tl.int64) * rates_stride + head).to(tl.float32))
        state *= tl.exp(_log_decay(shifted, speed, lowest, IS_BOUNDED))
        change = (v - tl.sum(state * k[:, None], axis=0)) * rate
        state += k[:, None] * change[None, :]
        answer = tl.sum(state * q[:, None], axis=0)
        answers = out + (token.to(tl.int64) * num_heads + head) * value_dim + column
        tl.store(answers, answer.to(out.dtype.element_ty), mask=is_column)
        token += 1
        tl.store(target, state, mask=is_inside & (token - start == known))


def gated_delta_rule(inputs: DeltaRuleInputs, matrices: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Rows, heads and columns are computed side by side."""
    mixed, decays, rates = (
        x if x.stride(1) == 1 else x.contiguous() for x in (inputs.mixed, inputs.decays, inputs.rates)
    )
    _, num_heads, key_dim, value_dim = matrices.shape
    out = mixed.new_empty((len(mixed), num_heads * value_dim))
    launch(
        _gated_delta_rule_kernel,
        (len(rows), num_heads, triton.cdiv(value_dim, _COLUMNS)),
        mixed, decays, rates, inputs.log_decay, inputs.decay_bias, matrices,
        rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens, out,
        mixed.stride(0), decays.stride(0), rates.stride(0), matrices.stride(0),
        inputs.num_key_heads, num_heads, key_dim, value_dim, key_dim**-0.5, inputs.rate_scale, inputs.lowest or 0.0,
        NUM_ROWS=triton.next_power_of_2(key_dim), NUM_COLUMNS=_COLUMNS, IS_TILED=inputs.is_tiled,
        HAS_ROW_DECAYS=inputs.has_row_decays(num_heads), IS_BOUNDED=inputs.lowest is not None,
    )  # fmt: skip
    return out
