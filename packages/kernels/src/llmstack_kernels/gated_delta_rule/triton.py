"""The gated delta rule on a GPU: some columns of a head's matrix per program.

A program takes the tokens of a row one by one and keeps its columns in registers, so a prompt's cut changes no bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.gated_delta_rule import DeltaRuleInputs
from llmstack_kernels.launch import describe, is_available, launch
from llmstack_kernels.state_rows import StateRows

__all__ = ["describe", "gated_delta_rule", "is_available"]

_COLUMNS = 32
"""Of a matrix per program: 128 rows of them are 32 registers of each thread of four warps."""


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
    state = tl.load(matrices + tl.load(sources + row) * matrices_stride + place, mask=is_inside, other=0.0)
    target = matrices + tl.load(targets + row) * matrices_stride + place
    start, end, known = tl.load(starts + row), tl.load(starts + row + 1), tl.load(num_known + row)
    speed = tl.exp(tl.load(log_decay + head))
    if HAS_ROW_DECAYS:
        decay_place = (head * key_dim + key)[:, None]
        is_decay = is_key[:, None]
    else:
        decay_place = head + tl.zeros((1, 1), tl.int32)
        is_decay = decay_place >= 0
    bias = tl.load(decay_bias + decay_place, mask=is_decay, other=0.0)
    num_keys = num_key_heads * key_dim
    key_head = head % num_key_heads if IS_TILED else head // (num_heads // num_key_heads)
    query_place = key_head * key_dim + key
    if known == 0:
        tl.store(target, state, mask=is_inside)
    token = start
    while token < end:  # the interpreter takes no loaded number as the end of a range
        own = mixed + token.to(tl.int64) * mixed_stride
        q = tl.load(own + query_place, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(own + num_keys + query_place, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(own + 2 * num_keys + head * value_dim + column, mask=is_column, other=0.0).to(tl.float32)
        q *= scale * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        own_decays = decays + token.to(tl.int64) * decays_stride
        shifted = tl.load(own_decays + decay_place, mask=is_decay, other=0.0).to(tl.float32) + bias
        if IS_BOUNDED:
            log_factor = lowest / (1.0 + tl.exp(-speed * shifted))
        else:
            softplus = tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
            log_factor = -speed * softplus
        rate = rate_scale / (1.0 + tl.exp(-tl.load(rates + token.to(tl.int64) * rates_stride + head).to(tl.float32)))
        state *= tl.exp(log_factor)
        change = (v - tl.sum(state * k[:, None], axis=0)) * rate
        state += k[:, None] * change[None, :]
        answer = tl.sum(state * q[:, None], axis=0)
        answer_place = (token.to(tl.int64) * num_heads + head) * value_dim + column
        tl.store(out + answer_place, answer.to(out.dtype.element_ty), mask=is_column)
        token += 1
        if token - start == known:
            tl.store(target, state, mask=is_inside)


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
