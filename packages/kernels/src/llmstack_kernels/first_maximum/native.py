"""First maximum in the package's own machine code."""

from __future__ import annotations

import torch

from llmstack_kernels.first_maximum import reference
from llmstack_kernels.native import Int, Pointer, library, require_library

_ARGUMENTS = (Pointer, Pointer, Pointer, Int, Int)


def first_maximum(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two passes over each row, the second one to the place found."""
    if values.dtype != torch.float32:
        return reference.first_maximum(values)
    values = values.contiguous()
    num_rows, size = values.shape
    best, indices = values.new_empty((num_rows,)), values.new_empty((num_rows,), dtype=torch.int64)
    function = require_library().function("first_maximum_f32", *_ARGUMENTS)
    function(values.data_ptr(), best.data_ptr(), indices.data_ptr(), num_rows, size)
    return best, indices


def is_available() -> bool:
    """True when a library was built for this processor."""
    return library() is not None


def describe() -> str:
    """The variant that runs."""
    return str(library())
