"""The scan of Mamba-2 on a GPU: some columns of a head's state per program.

A program takes the tokens of a row one by one and keeps its columns in registers, so a prompt's cut changes no bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.launch import launch
from llmstack_kernels.state_rows import StateRows
from llmstack_kernels.state_space_scan import ScanInputs

_COLUMNS = 32
"""Of a state per program: 128 rows of them are 32 registers of each thread of four warps."""


@triton.jit
def _state_space_scan_kernel(
    mixed,  # [num_tokens, num_heads * head_dim + 2 * num_groups * state_size]
    steps,  # [num_tokens, num_heads]
    log_decay,  # [num_heads] float32
    step_bias,  # [num_heads] float32
    skips,  # [num_heads] float32
    states,  # [num_blocks, num_heads, state_size, head_dim] float32
    starts,  # [num_rows + 1] int32
    sources,  # [num_rows] int64
    targets,  # [num_rows] int64
    num_known,  # [num_rows] int64
    out,  # [num_tokens, num_heads * head_dim]
    mixed_stride,
    steps_stride,
    states_stride,
    num_groups,
    num_heads,
    state_size,
    head_dim,
    least,
    largest,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, NUM_ROWS)
    column = tl.program_id(2) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_row, is_column = number < state_size, column < head_dim
    is_inside = is_row[:, None] & is_column[None, :]
    place = (head * state_size + number[:, None]) * head_dim + column[None, :]
    state = tl.load(states + tl.load(sources + row) * states_stride + place, mask=is_inside, other=0.0)
    target = states + tl.load(targets + row) * states_stride + place
    start, end, known = tl.load(starts + row), tl.load(starts + row + 1), tl.load(num_known + row)
    speed, bias, skip = tl.exp(tl.load(log_decay + head)), tl.load(step_bias + head), tl.load(skips + head)
    taken_place = num_heads * head_dim + head // (num_heads // num_groups) * state_size + number
    if known == 0:
        tl.store(target, state, mask=is_inside)
    token = start
    while token < end:  # the interpreter takes no loaded number as the end of a range
        own = mixed + token.to(tl.int64) * mixed_stride
        x = tl.load(own + head * head_dim + column, mask=is_column, other=0.0).to(tl.float32)
        taken = tl.load(own + taken_place, mask=is_row, other=0.0).to(tl.float32)
        asked = tl.load(own + num_groups * state_size + taken_place, mask=is_row, other=0.0).to(tl.float32)
        shifted = tl.load(steps + token.to(tl.int64) * steps_stride + head).to(tl.float32) + bias
        step = tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
        step = tl.minimum(tl.maximum(step, least), largest)
        state = state * tl.exp(-speed * step) + taken[:, None] * (x * step)[None, :]
        answer = tl.sum(state * asked[:, None], axis=0) + skip * x
        answer_place = (token.to(tl.int64) * num_heads + head) * head_dim + column
        tl.store(out + answer_place, answer.to(out.dtype.element_ty), mask=is_column)
        token += 1
        if token - start == known:
            tl.store(target, state, mask=is_inside)


def state_space_scan(inputs: ScanInputs, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Rows, heads and columns are computed side by side."""
    mixed, steps = (x if x.stride(1) == 1 else x.contiguous() for x in (inputs.mixed, inputs.steps))
    _, num_heads, state_size, head_dim = states.shape
    out = mixed.new_empty((len(mixed), num_heads * head_dim))
    launch(
        _state_space_scan_kernel,
        (len(rows), num_heads, triton.cdiv(head_dim, _COLUMNS)),
        mixed, steps, inputs.log_decay, inputs.step_bias, inputs.skip, states,
        rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens, out,
        mixed.stride(0), steps.stride(0), states.stride(0),
        inputs.num_groups, num_heads, state_size, head_dim, *inputs.limits,
        NUM_ROWS=triton.next_power_of_2(state_size), NUM_COLUMNS=_COLUMNS,
    )  # fmt: skip
    return out
