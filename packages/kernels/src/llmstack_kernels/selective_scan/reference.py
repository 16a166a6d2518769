"""The scan of Mamba-1 in plain PyTorch: what every backend computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from llmstack_kernels.selective_scan import SelectiveInputs
from llmstack_kernels.state_rows import StateRows


def selective_scan(inputs: SelectiveInputs, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """One token after the other, all channels at once."""
    out = torch.empty_like(inputs.x, memory_format=torch.contiguous_format)
    speeds = torch.exp(inputs.log_decay)

    def take_in(token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, taken, asked = (part[token].float() for part in (inputs.x, inputs.taken, inputs.asked))
        step = F.softplus(inputs.steps[token].float() + inputs.step_bias)
        state = state * torch.exp(-speeds * step) + taken[:, None] * (step * x)
        return state, (state * asked[:, None]).sum(0) + inputs.skip * x

    return rows.scan(states, out, take_in)
