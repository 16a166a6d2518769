"""Random draws in native code, without sorting rows."""

from __future__ import annotations

import torch

from llmstack_kernels.draw_tokens import DrawParameters
from llmstack_kernels.native import Int, Pointer, require_library

_ARGUMENTS = (*[Pointer] * 9, Int, Int)


def draw_tokens(logits: torch.Tensor, best: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """Rows are shared among the threads."""
    token_ids = torch.empty_like(parameters.rows)
    own = (parameters.temperature, parameters.min_p, parameters.top_k, parameters.top_p, parameters.uniforms)
    tensors = (logits, parameters.rows, best, *own, token_ids)
    function = require_library().function("draw_tokens_f32", *_ARGUMENTS)
    function(*[tensor.data_ptr() for tensor in tensors], len(token_ids), logits.shape[1])
    return token_ids
