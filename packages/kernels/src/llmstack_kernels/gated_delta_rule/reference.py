"""The gated delta rule in plain PyTorch: what every backend computes."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from llmstack_kernels.gated_delta_rule import DeltaRuleInputs
from llmstack_kernels.state_rows import StateRows

_EPS = 1e-6


def gated_delta_rule(inputs: DeltaRuleInputs, matrices: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """One token after the other, all heads at once."""
    _, num_heads, _, value_dim = matrices.shape
    out = inputs.mixed.new_empty((len(inputs.mixed), num_heads * value_dim))
    return rows.scan(matrices, out, partial(_learn, inputs))


def _learn(inputs: DeltaRuleInputs, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The state behind a token, and its answer in float32 [num_heads * value_dim]."""
    num_heads, key_dim, value_dim = state.shape
    num_key_heads, group = inputs.num_key_heads, num_heads // inputs.num_key_heads
    sizes = [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim]
    query, key, value = inputs.mixed[token].float().split(sizes)
    heads = torch.arange(num_heads, device=query.device)
    heads = heads % num_key_heads if inputs.is_tiled else heads // group
    query, key = (_normalised(x.view(num_key_heads, key_dim))[heads] for x in (query, key))
    state = state * _decays(inputs, token, num_heads)[:, :, None]
    predicted = (state * key[:, :, None]).sum(1)
    rates = inputs.rate_scale * torch.sigmoid(inputs.rates[token].float())
    change = (value.view(num_heads, value_dim) - predicted) * rates[:, None]
    state = state + key[:, :, None] * change[:, None]
    return state, (state * (query * key_dim**-0.5)[:, :, None]).sum(1).flatten()


def _decays(inputs: DeltaRuleInputs, token: int, num_heads: int) -> torch.Tensor:
    """Factors of the rows of matrices: [num_heads, key_dim or 1]."""
    shifted = (inputs.decays[token].float() + inputs.decay_bias).view(num_heads, -1)
    speeds = torch.exp(inputs.log_decay)[:, None]
    if inputs.lowest is not None:
        return torch.exp(inputs.lowest * torch.sigmoid(speeds * shifted))
    return torch.exp(-speeds * F.softplus(shifted))


def _normalised(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _EPS)
