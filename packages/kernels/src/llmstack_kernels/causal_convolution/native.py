"""Causal convolution in native code."""

from __future__ import annotations

import torch

from llmstack_kernels.causal_convolution import reference
from llmstack_kernels.native import ACTIVATION_TO_CODE, DTYPE_TO_SUFFIX, Int, Pointer, require_library
from llmstack_kernels.state_rows import StateRows

_ARGUMENTS = (Pointer, Int, *(Pointer,) * 3, Int, *(Pointer,) * 5, Int, Int, Int, Int)


def causal_convolution(
    inputs: torch.Tensor,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    rows: StateRows,
    activation: str,
) -> torch.Tensor:
    """Channels are shared among threads; inputs may be slices of a wider projection."""
    if inputs.dtype not in DTYPE_TO_SUFFIX:
        return reference.causal_convolution(inputs, taps, bias, tails, rows, activation)
    if inputs.stride(1) != 1:
        inputs = inputs.contiguous()
    length, num_channels = taps.shape
    out = inputs.new_empty(inputs.shape)
    function = require_library().function(f"causal_convolution_{DTYPE_TO_SUFFIX[inputs.dtype]}", *_ARGUMENTS)
    states = (rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens)
    function(
        inputs.data_ptr(), inputs.stride(0), taps.data_ptr(), 0 if bias is None else bias.data_ptr(), tails.data_ptr(),
        tails.stride(0),
        *(tensor.data_ptr() for tensor in states), out.data_ptr(),
        len(rows), num_channels, length, ACTIVATION_TO_CODE[activation],
    )  # fmt: skip
    return out
