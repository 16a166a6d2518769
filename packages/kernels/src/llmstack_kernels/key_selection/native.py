"""Selection of keys in native code, which reads the blocks in place.

A token's keys are the same alone and in any batch, decoded and in any chunk of a prompt.
"""

from __future__ import annotations

import struct

import torch

from llmstack_kernels.key_selection import SelectionInputs, reference
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Pointer, require_library

_DIM_STEP = 16  # lanes of a vector
_ARGUMENTS = struct.Struct("=14q")  # as `Selection` in native.cpp


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernel computes heads of this size; elsewhere PyTorch does."""
    return head_dim % _DIM_STEP == 0


def select_keys(inputs: SelectionInputs) -> torch.Tensor:  # [num_tokens, num_selected] int32
    """Tiles of keys are shared among threads. Other sizes and types go through `reference`."""
    query, cache = inputs.query.contiguous(), inputs.key_cache
    num_tokens, num_heads, head_dim = query.shape
    if query.dtype != cache.dtype or query.dtype not in DTYPE_TO_SUFFIX or not supports_head_dim(head_dim):
        return reference.select_keys(inputs)
    block_size, weights = cache.shape[2], inputs.weights.contiguous()
    rows = (inputs.query_start_loc, inputs.seq_lens, inputs.block_tables)
    if cache.stride()[2:] != (head_dim, 1) or any(values.dtype != torch.int32 for values in rows):
        raise ValueError("Each block must be contiguous, and the rows' tensors must be int32.")
    out = torch.empty((num_tokens, inputs.num_selected), dtype=torch.int32)
    arguments = _ARGUMENTS.pack(
        out.data_ptr(), query.data_ptr(), weights.data_ptr(), cache.data_ptr(), cache.stride(0),
        *(values.data_ptr() for values in rows), inputs.block_tables.stride(0),
        len(inputs.seq_lens), num_heads, head_dim, block_size, inputs.num_selected,
    )  # fmt: skip
    require_library().function(f"select_keys_{DTYPE_TO_SUFFIX[query.dtype]}", Pointer)(arguments)
    return out
