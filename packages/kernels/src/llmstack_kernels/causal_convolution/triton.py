"""Causal convolution on a GPU: some channels of a row per program.

Each token is summed on its own, tap after tap, so a prompt's cut changes no bit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.launch import launch
from llmstack_kernels.state_rows import StateRows

_TOKENS, _CHANNELS = 16, 128


@triton.jit
def _causal_convolution_kernel(
    inputs,  # [num_tokens, num_channels]
    taps,  # [LENGTH, num_channels] float32
    bias,  # [num_channels] float32
    tails,  # [num_blocks, LENGTH - 1, num_channels]
    starts,  # [num_rows + 1] int32
    sources,  # [num_rows] int64
    targets,  # [num_rows] int64
    num_known,  # [num_rows] int64
    out,  # [num_tokens, num_channels]
    inputs_stride,
    tails_stride,
    num_channels,
    LENGTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.program_id(1) * NUM_CHANNELS + tl.arange(0, NUM_CHANNELS)
    is_channel = channel < num_channels
    start, end, known = tl.load(starts + row), tl.load(starts + row + 1), tl.load(num_known + row)
    source = tails + tl.load(sources + row) * tails_stride + channel
    target = tails + tl.load(targets + row) * tails_stride + channel
    first = start
    while first < end:  # the interpreter takes no loaded number as the end of a range
        token = first + tl.arange(0, NUM_TOKENS)
        total = tl.zeros((NUM_TOKENS, NUM_CHANNELS), dtype=tl.float32)
        for tap in tl.static_range(LENGTH):
            place = token - (LENGTH - 1 - tap)
            is_own = place >= start
            own = inputs + place.to(tl.int64)[:, None] * inputs_stride + channel[None, :]
            earlier = source[None, :] + (place - start + LENGTH - 1)[:, None] * num_channels
            mask = (token < end)[:, None] & is_channel[None, :]
            x = tl.load(own, mask=mask & is_own[:, None], other=0.0).to(tl.float32)
            x += tl.load(earlier, mask=mask & (place < start)[:, None], other=0.0).to(tl.float32)
            total += x * tl.load(taps + tap * num_channels + channel, mask=is_channel, other=0.0)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=is_channel, other=0.0)[None, :]
        if HAS_SILU:
            total *= 1.0 / (1.0 + tl.exp(-total))
        result = out + token.to(tl.int64)[:, None] * num_channels + channel[None, :]
        tl.store(result, total.to(out.dtype.element_ty), mask=(token < end)[:, None] & is_channel[None, :])
        first += NUM_TOKENS
    for place in tl.static_range(LENGTH - 1):
        before_start = known + place  # its place in the old tail, and behind that in the row
        token = start + before_start - (LENGTH - 1)
        is_own = before_start >= LENGTH - 1
        is_before = is_channel & (before_start < LENGTH - 1)
        own = tl.load(inputs + token.to(tl.int64) * inputs_stride + channel, mask=is_channel & is_own, other=0.0)
        earlier = tl.load(source + before_start * num_channels, mask=is_before, other=0.0)
        tl.store(target + place * num_channels, tl.where(is_own, own, earlier), mask=is_channel)


def causal_convolution(
    inputs: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: StateRows,
    activation: str,
) -> torch.Tensor:
    """Rows and channels are computed side by side."""
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    taps = taps.contiguous()
    length, num_channels = taps.shape
    out = inputs.new_empty(inputs.shape)
    launch(
        _causal_convolution_kernel,
        (len(rows), triton.cdiv(num_channels, _CHANNELS)),
        inputs, taps, taps if bias is None else bias, tails,
        rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens, out,
        inputs.stride(0), tails.stride(0), num_channels,
        LENGTH=length, HAS_BIAS=bias is not None, HAS_SILU=activation == "silu",
        NUM_TOKENS=_TOKENS, NUM_CHANNELS=_CHANNELS,
    )  # fmt: skip
    return out
