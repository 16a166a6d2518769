"""Embeddings in native code."""

from __future__ import annotations

import torch

from llmstack_kernels import reference
from llmstack_kernels.linear.block_weight import BLOCK_TYPES, BlockWeight
from llmstack_kernels.linear.packed_weight import PackedWeight
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Float, Int, Pointer, require_library

_ARGUMENTS = (Pointer, Pointer, Pointer, Pointer, Int, Int, Float)
_BLOCK_ARGUMENTS = (Pointer, Pointer, Int, Pointer, Pointer, Int, Int, Float)
_PART_ARGUMENTS = (Pointer, Pointer, Pointer, Int, Int, Int, Int, Float)


def embedding(ids: torch.Tensor, table: torch.Tensor, addend: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Looks up, scales and adds in one pass."""
    if table.dtype not in DTYPE_TO_SUFFIX or (addend is not None and addend.dtype != table.dtype):
        return reference.embedding(ids, table, addend, scale)
    table, ids = table.contiguous(), ids.contiguous()
    addend = None if addend is None else addend.contiguous()
    num_ids, size = ids.shape[0], table.shape[1]
    out = table.new_empty((num_ids, size))
    function = require_library().function(f"embedding_{DTYPE_TO_SUFFIX[table.dtype]}", *_ARGUMENTS)
    addend_pointer = 0 if addend is None else addend.data_ptr()
    function(ids.data_ptr(), table.data_ptr(), addend_pointer, out.data_ptr(), num_ids, size, scale)
    return out


def embedding_of_packed(
    ids: torch.Tensor, weight: PackedWeight, addend: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Embeddings out of a table that a linear layer of this library has packed."""
    ids = ids.contiguous()
    addend = None if addend is None else addend.contiguous()
    num_ids, size = ids.shape[0], weight.shape[1]
    out = ids.new_empty((num_ids, size), dtype=weight.dtype)
    function = require_library().function(f"embedding_packed_{DTYPE_TO_SUFFIX[weight.dtype]}", *_ARGUMENTS)
    addend_pointer = 0 if addend is None else addend.data_ptr()
    function(ids.data_ptr(), weight.tensors[0].data_ptr(), addend_pointer, out.data_ptr(), num_ids, size, scale)
    return out


def embedding_of_blocks(
    ids: torch.Tensor, table: BlockWeight, dtype: torch.dtype, addend: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Looks up the rows in blocks of a file, in one piece and in order, scales them and adds."""
    ids = ids.contiguous()
    addend = None if addend is None else addend.contiguous()
    num_ids, size = ids.shape[0], table.shape[1]
    out = ids.new_empty((num_ids, size), dtype=dtype)
    function = require_library().function(f"embedding_blocks_{DTYPE_TO_SUFFIX[dtype]}", *_BLOCK_ARGUMENTS)
    block_type, addend_pointer = [*BLOCK_TYPES].index(table.block_type), 0 if addend is None else addend.data_ptr()
    blocks = table.parts[0].data_ptr()
    function(ids.data_ptr(), blocks, block_type, addend_pointer, out.data_ptr(), num_ids, size, scale)
    return out


def embedding_part(ids: torch.Tensor, table: torch.Tensor, first_id: int, scale: float) -> torch.Tensor:
    """Looks up and scales the rows that the table has, and fills the others with zeros."""
    if table.dtype not in DTYPE_TO_SUFFIX:
        return reference.embedding_part(ids, table, first_id, scale)
    table, ids = table.contiguous(), ids.contiguous()
    num_ids, (num_rows, size) = ids.shape[0], table.shape
    out = table.new_empty((num_ids, size))
    function = require_library().function(f"embedding_part_{DTYPE_TO_SUFFIX[table.dtype]}", *_PART_ARGUMENTS)
    function(ids.data_ptr(), table.data_ptr(), out.data_ptr(), num_ids, size, first_id, num_rows, scale)
    return out
