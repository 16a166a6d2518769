"""RMS normalisation in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Float, Int, Pointer, require_library

_ARGUMENTS = (Pointer, Int, Int, Pointer, Pointer, Pointer, Pointer, Int, Int, Float)
_GATED_ARGUMENTS = (Pointer, Pointer, Int, Int, Pointer, Int, Pointer, Int, Int, Float, Int)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row; the heads of tokens may be slices of a wider projection."""
    if x.dtype not in DTYPE_TO_SUFFIX:
        return reference.rms_norm(x, weight, eps)
    out = x.new_empty(x.shape)
    size = x.shape[-1]
    if x.ndim == 3 and x.stride()[1:] == (size, 1):
        _run(x, x.shape[1], x.stride(0), 0, weight, out, 0, eps)
    else:
        _run(x.contiguous(), 1, size, 0, weight, out, 0, eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise in one pass."""
    if x.dtype not in DTYPE_TO_SUFFIX:
        return reference.fused_add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _run(x, 1, x.shape[-1], residual.data_ptr(), weight, out, total.data_ptr(), eps)
    return out, total


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, is_gated_first: bool
) -> torch.Tensor:
    """Norm and gate in one pass; gates may be slices of a wider projection."""
    size = x.shape[-1]
    if x.dtype not in DTYPE_TO_SUFFIX:
        return reference.gated_rms_norm(x, gate, weight, eps, is_gated_first)
    x = x.contiguous()
    if gate.stride()[1:] != (size, 1):
        gate = gate.contiguous()
    out = torch.empty_like(x)
    function = require_library().function(f"gated_rms_norm_{DTYPE_TO_SUFFIX[x.dtype]}", *_GATED_ARGUMENTS)
    gates = (gate.data_ptr(), gate.shape[1], gate.stride(0))
    sizes = (x.numel() // size, size, eps, int(is_gated_first))
    function(x.data_ptr(), *gates, weight.data_ptr(), weight.numel() // size, out.data_ptr(), *sizes)
    return out


def _run(
    x: torch.Tensor,
    group_rows: int,
    group_stride: int,
    residual: int,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: int,
    eps: float,
) -> None:
    size = x.shape[-1]
    name = f"rms_norm_{DTYPE_TO_SUFFIX[x.dtype]}_{DTYPE_TO_SUFFIX[weight.dtype]}"
    function = require_library().function(name, *_ARGUMENTS)
    rows = (x.data_ptr(), group_rows, group_stride)
    function(*rows, residual, weight.data_ptr(), out.data_ptr(), total, x.numel() // size, size, eps)
