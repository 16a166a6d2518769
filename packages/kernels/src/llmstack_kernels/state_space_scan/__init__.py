"""The scan of Mamba-2: a matrix per head that decays, and takes in each token.

The recurrence is that of arXiv 2405.21060, of one decay per head and token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """The inputs that the states of all heads take in during a step.

    Head h has the B and C of group h // (num_heads / num_groups).

    Attributes:
        mixed: Of each token the inputs x of all heads, then B of all groups, then C of all groups.
        steps: Before their function; rows may be slices of a wider projection.
        log_decay: Logarithm of each head's speed of decay.
        step_bias: Added to `steps`.
        skip: Factor of a head's input that is added to its output.
        limits: Least and largest step.
    """

    mixed: torch.Tensor  # [num_tokens, num_heads * head_dim + 2 * num_groups * state_size]
    steps: torch.Tensor  # [num_tokens, num_heads], of the type of `mixed`
    log_decay: torch.Tensor  # [num_heads] float32
    step_bias: torch.Tensor  # [num_heads] float32
    skip: torch.Tensor  # [num_heads] float32
    num_groups: int
    limits: tuple[float, float] = (0.0, math.inf)


def state_space_scan(
    inputs: ScanInputs,
    states: torch.Tensor,  # [num_blocks, num_heads, state_size, head_dim] float32; blocks may be apart
    rows: StateRows,
) -> torch.Tensor:  # [num_tokens, num_heads * head_dim], of the type of `inputs.mixed`
    """The outputs of the scan; the states change token by token.

    Of each token and head, with step = softplus(step + step_bias) within the limits:

        S = exp(-exp(log_decay) * step) * S + B (step * x)
        out = C S + skip * x

    All is computed in float32, and `out` is rounded once. A row begins with the states of its source block, and those
    after its known tokens are written to its target block.
    """
    _, num_heads, state_size, head_dim = states.shape
    width = num_heads * head_dim + 2 * inputs.num_groups * state_size
    num_tokens = len(inputs.mixed)
    if inputs.mixed.shape != (num_tokens, width) or num_heads % inputs.num_groups:
        raise ValueError(f"inputs {inputs.mixed.shape} do not fit states {states.shape}.")
    if (inputs.steps.shape, inputs.steps.dtype) != ((num_tokens, num_heads), inputs.mixed.dtype):
        raise ValueError(f"steps must be [{num_tokens}, {num_heads}] of {inputs.mixed.dtype}.")
    heads = (inputs.log_decay, inputs.step_bias, inputs.skip)
    if any((one.shape, one.dtype) != ((num_heads,), torch.float32) for one in heads):
        raise ValueError(f"log_decay, step_bias and skip must be float32 [{num_heads}].")
    if states.dtype != torch.float32 or not states[0].is_contiguous():
        raise ValueError(f"states must be float32 and each block contiguous, got {states.dtype}.")
    rows.check(num_tokens)
    out: torch.Tensor = implementation("state_space_scan", states.device.type).state_space_scan(inputs, states, rows)
    return out
