"""The scan of Mamba-1 in native code."""

from __future__ import annotations

import torch

from llmstack_kernels.native import DTYPE_TO_SUFFIX, Int, Pointer, require_library
from llmstack_kernels.selective_scan import SelectiveInputs, reference
from llmstack_kernels.state_rows import StateRows

MAX_STATE_SIZE = 256
_ARGUMENTS = (*(Pointer, Int) * 4, *(Pointer,) * 4, Int, *(Pointer,) * 5, *(Int,) * 3)


def selective_scan(inputs: SelectiveInputs, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Channels are shared among threads; the states of some of them stay in the first cache."""
    _, state_size, num_channels = states.shape
    if inputs.x.dtype not in DTYPE_TO_SUFFIX or state_size > MAX_STATE_SIZE:
        return reference.selective_scan(inputs, states, rows)
    strided = [
        part if part.stride(1) == 1 else part.contiguous()
        for part in (inputs.x, inputs.steps, inputs.taken, inputs.asked)
    ]
    out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
    function = require_library().function(f"selective_scan_{DTYPE_TO_SUFFIX[out.dtype]}", *_ARGUMENTS)
    channels = (inputs.log_decay, inputs.step_bias, inputs.skip, states)
    blocks = (rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens, out)
    function(
        *(part for x in strided for part in (x.data_ptr(), x.stride(0))),
        *(tensor.data_ptr() for tensor in channels), states.stride(0), *(tensor.data_ptr() for tensor in blocks),
        len(rows), state_size, num_channels,
    )  # fmt: skip
    return out
