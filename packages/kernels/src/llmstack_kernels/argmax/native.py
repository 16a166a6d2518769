"""Argmax in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.native import Int, Pointer, require_library

_ARGUMENTS = (Pointer, Pointer, Pointer, Int, Int)


def argmax(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two passes over each row; the second one ends at the index."""
    if values.dtype != torch.float32:
        return reference.argmax(values)
    values = values.contiguous()
    num_rows, size = values.shape
    best, indices = values.new_empty((num_rows,)), values.new_empty((num_rows,), dtype=torch.int64)
    function = require_library().function("argmax_f32", *_ARGUMENTS)
    function(values.data_ptr(), best.data_ptr(), indices.data_ptr(), num_rows, size)
    return best, indices
