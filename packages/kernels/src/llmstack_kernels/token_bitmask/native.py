"""Token bitmasks in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.native import Int, Pointer, require_library

_ARGUMENTS = (Pointer, Pointer, Pointer, Int, Int)


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Masks a word of 32 tokens at a time; words without a 0 are skipped."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        reference.apply_token_bitmask(logits, rows, bits)
        return
    rows, bits = rows.contiguous(), bits.contiguous()
    function = require_library().function("token_bitmask_f32", *_ARGUMENTS)
    function(logits.data_ptr(), rows.data_ptr(), bits.data_ptr(), len(rows), logits.shape[-1])
