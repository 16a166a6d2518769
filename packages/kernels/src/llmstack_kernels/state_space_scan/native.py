"""The scan of Mamba-2 in native code."""

from __future__ import annotations

import torch

from llmstack_kernels.native import DTYPE_TO_SUFFIX, Float, Int, Pointer, require_library
from llmstack_kernels.state_rows import StateRows
from llmstack_kernels.state_space_scan import ScanInputs, reference

MAX_STATE_SIZE = 256
_ARGUMENTS = (*(Pointer, Int) * 2, *(Pointer,) * 5, Int, *(Pointer,) * 5, *(Int,) * 6, Float, Float)


def state_space_scan(inputs: ScanInputs, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Heads and columns of their states are shared among threads; a part of a state stays in the first cache."""
    mixed, steps = inputs.mixed, inputs.steps
    _, num_heads, state_size, head_dim = states.shape
    if mixed.dtype not in DTYPE_TO_SUFFIX or state_size > MAX_STATE_SIZE:
        return reference.state_space_scan(inputs, states, rows)
    mixed, steps = (x if x.stride(1) == 1 else x.contiguous() for x in (mixed, steps))
    out = mixed.new_empty((len(mixed), num_heads * head_dim))
    factors = mixed.new_empty((len(mixed), num_heads, 2), dtype=torch.float32)
    function = require_library().function(f"state_space_scan_{DTYPE_TO_SUFFIX[mixed.dtype]}", *_ARGUMENTS)
    heads = (inputs.log_decay, inputs.step_bias, inputs.skip, factors, states)
    blocks = (rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens, out)
    function(
        *(part for x in (mixed, steps) for part in (x.data_ptr(), x.stride(0))),
        *(tensor.data_ptr() for tensor in heads), states.stride(0), *(tensor.data_ptr() for tensor in blocks),
        len(rows), len(mixed), inputs.num_groups, num_heads, state_size, head_dim, *inputs.limits,
    )  # fmt: skip
    return out
