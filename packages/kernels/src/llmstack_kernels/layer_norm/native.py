"""Layer normalisation in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Float, Int, Pointer, require_library


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    if x.dtype not in DTYPE_TO_SUFFIX or weight.dtype != x.dtype:
        return reference.layer_norm(x, weight, bias, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    size = x.shape[-1]
    function = require_library().function(
        f"layer_norm_{DTYPE_TO_SUFFIX[x.dtype]}", Pointer, Pointer, Pointer, Pointer, Int, Int, Float
    )
    bias_pointer = 0 if bias is None else bias.data_ptr()
    function(x.data_ptr(), weight.data_ptr(), bias_pointer, out.data_ptr(), x.numel() // size, size, eps)
    return out


def fused_add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds in a pass of its own: on a CPU, linear layers add the residual themselves."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total
