"""Paged attention in native code, which reads the blocks in place.

A token's result is bit-equal however it is computed: alone and in any batch, decoded, prefilled whole or in chunks.
"""

from __future__ import annotations

import struct

import torch

from llmstack_kernels import native
from llmstack_kernels.native import DTYPE_TO_SUFFIX, Pointer, require_library
from llmstack_kernels.paged_attention import cpu
from llmstack_kernels.paged_attention.inputs import AttentionInputs

_DIM_STEP = 16  # lanes of a vector
_NO_WINDOW = 1 << 30  # more tokens than a context has
# As `Call` in native.cpp. One packed argument: the conversion of 22 takes ctypes 2 us, and each layer makes a call.
_ARGUMENTS = struct.Struct("=22q2d")
_FUNCTIONS = {dtype: f"paged_attention_{suffix}" for dtype, suffix in DTYPE_TO_SUFFIX.items()}


def describe() -> str:
    """The variant that runs, and the cases that PyTorch computes."""
    return f"{native.describe()}; PyTorch where head_dim is no multiple of {_DIM_STEP}"


def supports(query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether the kernel computes in this type and these head sizes; elsewhere PyTorch does."""
    is_known = query.dtype in DTYPE_TO_SUFFIX and query.dtype == key_cache.dtype
    return is_known and query.shape[2] % _DIM_STEP == value_cache.shape[3] % _DIM_STEP == 0


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernel computes heads of this size."""
    return head_dim % _DIM_STEP == 0


def paged_attention(inputs: AttentionInputs) -> torch.Tensor:  # [num_tokens, num_heads, value_dim]
    """Attends all rows in one native call, which needs no lists; other shapes and types go through `cpu`."""
    if not supports(inputs.query, inputs.key_cache, inputs.value_cache):
        return cpu.paged_attention(inputs)
    query, key_cache, value_cache = inputs.query, inputs.key_cache, inputs.value_cache
    query_start_loc, seq_lens, block_tables = inputs.query_start_loc, inputs.seq_lens, inputs.block_tables
    token_stride, head_stride, dim_stride = query.stride()
    key_block_stride, *key_strides = key_cache.stride()
    value_block_stride, *value_strides = value_cache.stride()
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    value_dim, value_stride = value_cache.shape[3], value_strides[1]
    is_whole = key_strides == [block_size * head_dim, head_dim, 1] and dim_stride == 1
    if not is_whole or value_strides != [block_size * value_stride, value_stride, 1]:
        raise ValueError("Each block and each query head must be contiguous.")
    if not query_start_loc.dtype == seq_lens.dtype == block_tables.dtype == torch.int32:
        raise ValueError("query_start_loc, seq_lens and block_tables must be int32.")
    out = query.new_empty((query.shape[0], num_heads, value_dim))
    arguments = _ARGUMENTS.pack(
        out.data_ptr(),
        query.data_ptr(),
        token_stride,
        head_stride,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        key_block_stride,
        value_block_stride,
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        0 if inputs.alibi_slopes is None else inputs.alibi_slopes.data_ptr(),
        0 if inputs.sinks is None else inputs.sinks.data_ptr(),
        seq_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        value_dim,
        value_stride,
        inputs.sliding_window or _NO_WINDOW,
        inputs.scale,
        inputs.soft_cap or 0.0,
    )
    require_library().function(_FUNCTIONS[query.dtype], Pointer)(arguments)
    return out
