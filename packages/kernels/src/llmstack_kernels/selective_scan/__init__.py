"""The scan of Mamba-1: numbers per channel that decay, and take in each token.

The recurrence is that of arXiv 2312.00752, of one step per channel and token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class SelectiveInputs:
    """The inputs that the states of all channels take in during a step.

    Rows of the first four may be slices of wider ones.

    Attributes:
        x: The inputs.
        steps: Before their function.
        taken, asked: B and C, which all channels share.
        log_decay: Logarithm of the speed of decay.
        step_bias: Added to `steps`.
        skip: Factor of an input that is added to the output.
    """

    x: torch.Tensor  # [num_tokens, num_channels]
    steps: torch.Tensor  # [num_tokens, num_channels], of the type of `x`
    taken: torch.Tensor  # [num_tokens, state_size], of the type of `x`
    asked: torch.Tensor  # [num_tokens, state_size], of the type of `x`
    log_decay: torch.Tensor  # [state_size, num_channels] float32
    step_bias: torch.Tensor  # [num_channels] float32
    skip: torch.Tensor  # [num_channels] float32


def selective_scan(
    inputs: SelectiveInputs,
    states: torch.Tensor,  # [num_blocks, state_size, num_channels] float32; blocks may be apart
    rows: StateRows,
) -> torch.Tensor:  # [num_tokens, num_channels], of the type of `inputs.x`
    """The outputs of the scan; the states change token by token.

    Of each token and channel, with step = softplus(step + step_bias), and S a column of the states:

        S = exp(-exp(log_decay) * step) * S + B (step * x)
        out = C S + skip * x

    All is computed in float32, and `out` is rounded once. A row begins with the states of its source block, and those
    after its known tokens are written to its target block.
    """
    _, state_size, num_channels = states.shape
    x, num_tokens = inputs.x, len(inputs.x)
    per_token = (
        (x, num_channels),
        (inputs.steps, num_channels),
        (inputs.taken, state_size),
        (inputs.asked, state_size),
    )
    if any((one.shape, one.dtype) != ((num_tokens, width), x.dtype) for one, width in per_token):
        raise ValueError(f"inputs {[tuple(one.shape) for one, _ in per_token]} do not fit states {states.shape}.")
    channels = (num_channels,)
    others = ((inputs.log_decay, (state_size, *channels)), (inputs.step_bias, channels), (inputs.skip, channels))
    if any((one.shape, one.dtype) != (shape, torch.float32) for one, shape in others):
        raise ValueError(
            f"log_decay, step_bias and skip must be float32, of {state_size} rows or {num_channels} columns."
        )
    if states.dtype != torch.float32 or not states[0].is_contiguous() or not inputs.log_decay.is_contiguous():
        raise ValueError(f"states must be float32 and each block contiguous, got {states.dtype}.")
    rows.check(num_tokens)
    out: torch.Tensor = implementation("selective_scan", states.device.type).selective_scan(inputs, states, rows)
    return out
