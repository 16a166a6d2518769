"""The scan of Mamba-1 on a GPU: some channels per program.

A program takes the tokens of a row one by one and keeps its channels in registers, so a prompt's cut changes no bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.launch import launch
from llmstack_kernels.selective_scan import SelectiveInputs
from llmstack_kernels.state_rows import StateRows

_CHANNELS = 64
"""Per program: with 16 numbers each they are 8 registers of each thread of four warps."""


@triton.jit
def _selective_scan_kernel(
    inputs,  # [num_tokens, num_channels]
    steps,  # [num_tokens, num_channels]
    all_taken,  # [num_tokens, state_size]
    all_asked,  # [num_tokens, state_size]
    log_decay,  # [state_size, num_channels] float32
    step_bias,  # [num_channels] float32
    skips,  # [num_channels] float32
    states,  # [num_blocks, state_size, num_channels] float32
    starts,  # [num_rows + 1] int32
    sources,  # [num_rows] int64
    targets,  # [num_rows] int64
    num_known,  # [num_rows] int64
    out,  # [num_tokens, num_channels]
    inputs_stride,
    steps_stride,
    taken_stride,
    asked_stride,
    states_stride,
    state_size,
    num_channels,
    NUM_ROWS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    number = tl.arange(0, NUM_ROWS)
    column = tl.program_id(1) * NUM_COLUMNS + tl.arange(0, NUM_COLUMNS)
    is_row, is_column = number < state_size, column < num_channels
    is_inside = is_row[:, None] & is_column[None, :]
    place = number[:, None] * num_channels + column[None, :]
    state = tl.load(states + tl.load(sources + row) * states_stride + place, mask=is_inside, other=0.0)
    target = states + tl.load(targets + row) * states_stride + place
    start, end, known = tl.load(starts + row), tl.load(starts + row + 1), tl.load(num_known + row)
    speed = tl.exp(tl.load(log_decay + place, mask=is_inside, other=0.0))
    bias = tl.load(step_bias + column, mask=is_column, other=0.0)
    skip = tl.load(skips + column, mask=is_column, other=0.0)
    if known == 0:
        tl.store(target, state, mask=is_inside)
    token = start
    while token < end:  # the interpreter takes no loaded number as the end of a range
        line = token.to(tl.int64)
        x = tl.load(inputs + line * inputs_stride + column, mask=is_column, other=0.0).to(tl.float32)
        taken = tl.load(all_taken + line * taken_stride + number, mask=is_row, other=0.0).to(tl.float32)
        asked = tl.load(all_asked + line * asked_stride + number, mask=is_row, other=0.0).to(tl.float32)
        shifted = tl.load(steps + line * steps_stride + column, mask=is_column, other=0.0).to(tl.float32) + bias
        step = tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
        state = state * tl.exp(-speed * step[None, :]) + taken[:, None] * (x * step)[None, :]
        answer = tl.sum(state * asked[:, None], axis=0) + skip * x
        tl.store(out + line * num_channels + column, answer.to(out.dtype.element_ty), mask=is_column)
        token += 1
        if token - start == known:
            tl.store(target, state, mask=is_inside)


def selective_scan(inputs: SelectiveInputs, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Rows and channels are computed side by side."""
    strided = [
        part if part.stride(1) == 1 else part.contiguous()
        for part in (inputs.x, inputs.steps, inputs.taken, inputs.asked)
    ]
    _, state_size, num_channels = states.shape
    out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
    launch(
        _selective_scan_kernel,
        (len(rows), triton.cdiv(num_channels, _CHANNELS)),
        *strided, inputs.log_decay, inputs.step_bias, inputs.skip, states,
        rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens, out,
        *(part.stride(0) for part in strided), states.stride(0), state_size, num_channels,
        NUM_ROWS=triton.next_power_of_2(state_size), NUM_COLUMNS=_CHANNELS,
    )  # fmt: skip
    return out
