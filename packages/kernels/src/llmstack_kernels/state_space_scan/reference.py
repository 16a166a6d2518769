"""The scan of Mamba-2 in plain PyTorch: what every backend computes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from llmstack_kernels.state_rows import StateRows
from llmstack_kernels.state_space_scan import ScanInputs


def state_space_scan(inputs: ScanInputs, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """One token after the other, all heads at once."""
    _, num_heads, _, head_dim = states.shape
    out = inputs.mixed.new_empty((len(inputs.mixed), num_heads * head_dim))
    return rows.scan(states, out, partial(_take_in, inputs))


def _take_in(inputs: ScanInputs, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state behind a token, and its answer in float32 [num_heads * head_dim]."""
    num_heads, state_size, head_dim = state.shape
    num_groups = inputs.num_groups
    of_group = num_groups * state_size
    x, taken, asked = inputs.mixed[token].float().split([num_heads * head_dim, of_group, of_group])
    taken, asked = (
        part.view(num_groups, state_size).repeat_interleave(num_heads // num_groups, 0) for part in (taken, asked)
    )
    x = x.view(num_heads, head_dim)
    step = F.softplus(inputs.steps[token].float() + inputs.step_bias).clamp(*inputs.limits)
    decay = torch.exp(-torch.exp(inputs.log_decay) * step)
    state = state * decay[:, None, None] + taken[:, :, None] * (x * step[:, None])[:, None]
    return state, ((state * asked[:, :, None]).sum(1) + x * inputs.skip[:, None]).flatten()
