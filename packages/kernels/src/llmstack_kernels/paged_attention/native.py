"""Paged attention in the package's own machine code, which reads the blocks where they lie.

A token's result is bit-equal however it is computed: alone and in any batch, decoded, prefilled whole or in chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from llmstack_kernels.native import DTYPE_TO_SUFFIX, Pointer, library, require_library
from llmstack_kernels.paged_attention import cpu

_DIM_STEP = 16  # lanes of a vector
_NO_WINDOW = 1 << 30  # more tokens than a context has
# As `Call` in native.cpp. One packed argument: the conversion of 21 takes ctypes 2 us, and each layer makes a call.
_ARGUMENTS = struct.Struct("=19q2d")
_FUNCTIONS = {dtype: f"paged_attention_{suffix}" for dtype, suffix in DTYPE_TO_SUFFIX.items()}


def is_available() -> bool:
    """True when a library was built for this processor."""
    return library() is not None


def describe() -> str:
    """The variant that runs, and what it leaves to PyTorch."""
    return f"{library()}; PyTorch where head_dim is no multiple of {_DIM_STEP}"


def supports(query: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the kernel computes in this type and head size; elsewhere PyTorch does."""
    return supports_head_dim(query.shape[2]) and query.dtype in DTYPE_TO_SUFFIX and query.dtype == key_cache.dtype


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernel computes heads of this size."""
    return head_dim % _DIM_STEP == 0


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,  # [num_rows, max_blocks_per_row] int32
    scale: float,
    *,
    query_start_loc_list: Sequence[int] | None = None,
    seq_lens_list: Sequence[int] | None = None,
    max_query_len: int | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,  # [num_heads]
    key_scale: torch.Tensor | None = None,  # [num_kv_heads]
    value_scale: torch.Tensor | None = None,  # [num_kv_heads]
    plan: object | None = None,
    decodes_as_prefills: bool = False,
) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Attend all rows in one call, which needs no lists."""
    if not supports(query, key_cache):
        return cpu.paged_attention(
            query,
            key_cache,
            value_cache,
            query_start_loc,
            seq_lens,
            block_tables,
            scale,
            query_start_loc_list=query_start_loc_list,
            seq_lens_list=seq_lens_list,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
            key_scale=key_scale,
            value_scale=value_scale,
            plan=plan,
        )
    return _attend(
        query,
        key_cache,
        value_cache,
        query_start_loc,
        seq_lens,
        block_tables,
        scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=alibi_slopes,
    )


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    *,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
) -> torch.Tensor:
    token_stride, head_stride, dim_stride = query.stride()
    key_block_stride, *key_strides = key_cache.stride()
    value_block_stride, *value_strides = value_cache.stride()
    _, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    if not (key_strides == value_strides == [block_size * head_dim, head_dim, 1] and dim_stride == 1):
        raise ValueError("Each block and each query head must be contiguous.")
    if not query_start_loc.dtype == seq_lens.dtype == block_tables.dtype == torch.int32:
        raise ValueError("query_start_loc, seq_lens and block_tables must be int32.")
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
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
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        seq_lens.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        sliding_window or _NO_WINDOW,
        scale,
        soft_cap or 0.0,
    )
    require_library().function(_FUNCTIONS[query.dtype], Pointer)(arguments)
    return out
