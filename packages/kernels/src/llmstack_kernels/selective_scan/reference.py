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
    starts, known = rows.query_start_loc.tolist(), rows.num_known_tokens.tolist()
    for row, (source, target) in enumerate(zip(rows.sources.tolist(), rows.targets.tolist(), strict=True)):
        state = states[source].clone()  # [state_size, num_channels]
        for number, token in enumerate(range(starts[row], starts[row + 1])):
            if number == known[row]:
                states[target] = state
            x, taken, asked = (part[token].float() for part in (inputs.x, inputs.taken, inputs.asked))
            step = F.softplus(inputs.steps[token].float() + inputs.step_bias)
            state = state * torch.exp(-speeds * step) + taken[:, None] * (step * x)
            out[token] = (state * asked[:, None]).sum(0) + inputs.skip * x
        if known[row] == starts[row + 1] - starts[row]:
            states[target] = state
    return out
