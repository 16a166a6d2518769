"""The gated delta rule: a matrix per head that decays and learns.

The rule is that of arXiv 2412.06464: of each token only what the matrix predicts wrongly is learnt. With a decay for
each row of a matrix it is that of arXiv 2510.26692 (Kimi Delta Attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class DeltaRuleInputs:
    """The inputs from which the matrices of all heads learn in a step.

    Value head h has the queries and keys of head h // (num_value_heads / num_key_heads), or with `is_tiled` those of
    head h % num_key_heads.

    Attributes:
        mixed: Of each token all queries, then all keys, then all values.
        decays, rates: Before their functions; rows may be slices of a wider projection. A head has one decay, or one
            for each row of its matrix.
        log_decay: Logarithm of each head's speed of decay.
        decay_bias: Added to `decays`.
        rate_scale: Factor of the rates, behind their function.
        lowest: Lower bound of the logarithm of a decay, which then has another function; None for no bound.
    """

    mixed: torch.Tensor  # [num_tokens, 2 * num_key_heads * key_dim + num_value_heads * value_dim]
    decays: torch.Tensor  # [num_tokens, num_value_heads, or times key_dim], of the type of `mixed`
    rates: torch.Tensor  # [num_tokens, num_value_heads], of the type of `mixed`
    log_decay: torch.Tensor  # [num_value_heads] float32
    decay_bias: torch.Tensor  # [num_value_heads, or times key_dim] float32
    num_key_heads: int
    is_tiled: bool = False
    rate_scale: float = 1.0
    lowest: float | None = None

    def has_row_decays(self, num_heads: int) -> bool:
        """Whether each row of a matrix has a decay of its own."""
        return self.decays.shape[1] != num_heads


def gated_delta_rule(
    inputs: DeltaRuleInputs,
    matrices: torch.Tensor,  # [num_blocks, num_value_heads, key_dim, value_dim] float32; blocks may be apart
    rows: StateRows,
) -> torch.Tensor:  # [num_tokens, num_value_heads * value_dim], of the type of `inputs.mixed`
    """The queries' answers of the matrices, which change token by token.

    With q and k normalised to length 1, q divided by sqrt(key_dim), of each token and head:

        S = exp(-exp(log_decay) * softplus(decay + decay_bias)) * S
        S = S + k (rate_scale * sigmoid(rate) * (v - k S))
        out = q S

    With a lower bound, S first becomes exp(lowest * sigmoid(exp(log_decay) * (decay + decay_bias))) * S.

    All is computed in float32, and `out` is rounded once. A row begins with the matrices of its source block, and those
    after its known tokens are written to its target block.
    """
    _, num_heads, key_dim, value_dim = matrices.shape
    width = 2 * inputs.num_key_heads * key_dim + num_heads * value_dim
    num_tokens = len(inputs.mixed)
    if inputs.mixed.shape != (num_tokens, width) or num_heads % inputs.num_key_heads:
        raise ValueError(f"inputs {inputs.mixed.shape} do not fit matrices {matrices.shape}.")
    num_decays = num_heads * (key_dim if inputs.has_row_decays(num_heads) else 1)
    for gate, count in ((inputs.decays, num_decays), (inputs.rates, num_heads)):
        if (gate.shape, gate.dtype) != ((num_tokens, count), inputs.mixed.dtype):
            raise ValueError(f"decays and rates must be [{num_tokens}, {count}] of {inputs.mixed.dtype}.")
    for one, count in ((inputs.log_decay, num_heads), (inputs.decay_bias, num_decays)):
        if (one.shape, one.dtype) != ((count,), torch.float32):
            raise ValueError(f"log_decay and decay_bias must be float32 [{count}].")
    if matrices.dtype != torch.float32:
        raise ValueError(f"matrices must be float32, got {matrices.dtype}.")
    if not matrices[0].is_contiguous():
        raise ValueError("each block of the matrices must be contiguous.")
    rows.check(num_tokens)
    backend = implementation("gated_delta_rule", matrices.device.type)
    out: torch.Tensor = backend.gated_delta_rule(inputs, matrices, rows)
    return out
