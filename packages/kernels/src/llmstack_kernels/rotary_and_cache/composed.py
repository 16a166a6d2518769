"""Head norms, rotary embedding and KV write as three operations.

Each runs on the best backend for the device, which on a CPU is native code.
"""

from __future__ import annotations

import torch

from llmstack_kernels.reshape_and_cache import reshape_and_cache
from llmstack_kernels.rms_norm import rms_norm
from llmstack_kernels.rotary_embedding import rotary_embedding
from llmstack_kernels.rotary_inputs import RotaryInputs


def rotary_and_cache(inputs: RotaryInputs) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    return inputs.apply(rms_norm, rotary_embedding, reshape_and_cache)


def is_available() -> bool:
    """True: the operations run on any device."""
    return True


def describe() -> str:
    return "rotary_embedding, then reshape_and_cache"
