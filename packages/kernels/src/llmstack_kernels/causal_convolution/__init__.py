"""Convolution over the last tokens of a row, each channel on its own.

Its state is the inputs before the next token.
"""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.state_rows import StateRows

ACTIVATIONS = ("none", "silu")


def causal_convolution(
    inputs: torch.Tensor,  # [num_tokens, num_channels]; the tokens of each row follow one another
    taps: torch.Tensor,  # [length, num_channels] float32
    bias: torch.Tensor | None,  # [num_channels] float32
    tails: torch.Tensor,  # [num_blocks, length - 1, num_channels], of the inputs' type; blocks may be apart
    rows: StateRows,
    activation: str = "none",
) -> torch.Tensor:  # [num_tokens, num_channels]
    """activation(sum over taps of taps[i] * input of the token `length` - 1 - i before + bias).

    Inputs before a row are those of its source block in `tails`; its last inputs are written to its target block. Sums
    are in float32, tap after tap, and rounded once behind the activation.
    """
    length, num_channels = taps.shape
    if inputs.shape[1:] != (num_channels,) or tails.shape[1:] != (length - 1, num_channels) or length < 2:
        raise ValueError(f"{taps.shape} taps do not fit inputs {inputs.shape} and tails {tails.shape}.")
    if taps.dtype != torch.float32 or (bias is not None and (bias.shape, bias.dtype) != (taps.shape[1:], taps.dtype)):
        raise ValueError("taps and bias must be float32, one number per channel.")
    if tails.dtype != inputs.dtype:
        raise ValueError(f"tails of {tails.dtype} do not fit inputs of {inputs.dtype}.")
    if not tails[0].is_contiguous():
        raise ValueError("each block of the tails must be contiguous.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation[:64]!r} is unknown; {', '.join(ACTIVATIONS)} are known.")
    rows.check(len(inputs))
    backend = implementation("causal_convolution", inputs.device.type)
    out: torch.Tensor = backend.causal_convolution(inputs, taps, bias, tails, rows, activation)
    return out
