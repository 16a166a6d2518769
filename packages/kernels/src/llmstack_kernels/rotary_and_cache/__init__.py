"""Rotary embedding of queries and keys with the KV write, in one operation."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.rotary_inputs import RotaryInputs

__all__ = ["RotaryInputs", "rotary_and_cache"]


def rotary_and_cache(inputs: RotaryInputs) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """The rotated query; the rotated key and the value are written to their slots.

    The result is that of `rotary_embedding` and `reshape_and_cache` one after the other: a key is rounded to its type
    before it is stored in another. With both norms, each head of query and key goes through `rms_norm` first.

    Raises:
        ValueError: The inputs do not fit together.
    """
    inputs.check()
    module = implementation("rotary_and_cache", inputs.query.device.type)
    out: torch.Tensor = module.rotary_and_cache(inputs)
    return out
