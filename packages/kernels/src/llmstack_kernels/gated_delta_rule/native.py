"""The gated delta rule in native code."""

from __future__ import annotations

import torch

from llmstack_kernels.gated_delta_rule import DeltaRuleInputs, reference
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Float, Int, Pointer, require_library
from llmstack_kernels.state_rows import StateRows

MAX_KEY_DIM = 256
_ARGUMENTS = (Pointer, Int, *(Pointer, Int) * 2, *(Pointer,) * 4, Int, *(Pointer,) * 5, *(Int,) * 9, Float, Float)


def gated_delta_rule(inputs: DeltaRuleInputs, matrices: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Heads and columns of their matrices are shared among threads; a part of a matrix stays in the first cache."""
    mixed, decays, rates = inputs.mixed, inputs.decays, inputs.rates
    _, num_heads, key_dim, value_dim = matrices.shape
    if mixed.dtype not in DTYPE_TO_SUFFIX or key_dim > MAX_KEY_DIM:
        return reference.gated_delta_rule(inputs, matrices, rows)
    mixed, decays, rates = (x if x.stride(1) == 1 else x.contiguous() for x in (mixed, decays, rates))
    out = mixed.new_empty((len(mixed), num_heads * value_dim))
    num_decays = key_dim if inputs.has_row_decays(num_heads) else 1
    factors = mixed.new_empty((len(mixed), num_heads, num_decays + 1), dtype=torch.float32)
    function = require_library().function(f"gated_delta_rule_{DTYPE_TO_SUFFIX[mixed.dtype]}", *_ARGUMENTS)
    states = (rows.query_start_loc, rows.sources, rows.targets, rows.num_known_tokens)
    blocks = (inputs.log_decay, inputs.decay_bias, factors, matrices)
    strided = (part for x in (mixed, decays, rates) for part in (x.data_ptr(), x.stride(0)))
    sizes = (len(rows), len(mixed), inputs.num_key_heads, num_heads, key_dim, value_dim, inputs.is_tiled, num_decays)
    bound = (inputs.lowest is not None, inputs.rate_scale, inputs.lowest or 0.0)
    function(
        *strided, *(tensor.data_ptr() for tensor in blocks), matrices.stride(0),
        *(tensor.data_ptr() for tensor in (*states, out)), *sizes, *bound,
    )  # fmt: skip
    return out
