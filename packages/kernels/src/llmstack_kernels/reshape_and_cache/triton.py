"""KV writes on a GPU, with a program per token and tile of heads.

Nothing is cleared where a block begins: attention on a GPU loads the slots of its context only.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.tiles import NUM_WARPS, store_heads, with_whole_heads

_TILE_SIZE = 1024  # numbers: 16 of a thread, so two loads of 16 bytes where they have 16 bits


@triton.jit
def _reshape_and_cache_kernel(
    key,  # [num_tokens, num_heads, HEAD_DIM]
    value,  # likewise
    key_cache,  # [num_blocks, num_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache,  # likewise
    slot_mapping,  # [num_tokens] int64
    key_scale,  # [num_heads] float32, or None
    value_scale,  # likewise
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    key_block_stride,
    value_block_stride,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    wait_for_previous()
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return  # padding
    block, offset, apart = slot // BLOCK_SIZE, slot % BLOCK_SIZE * HEAD_DIM, BLOCK_SIZE * HEAD_DIM
    if tl.program_id(2) == 0:
        heads, place = key + token * key_stride, key_cache + block * key_block_stride + offset
        store_heads(
            heads, place, key_scale, tile, key_head_stride, apart, num_heads, 0, HEAD_DIM, TILE_HEADS, PADDED_DIM
        )
    else:
        heads, place = value + token * value_stride, value_cache + block * value_block_stride + offset
        store_heads(
            heads, place, value_scale, tile, value_head_stride, apart, num_heads, 0, HEAD_DIM, TILE_HEADS, PADDED_DIM
        )


def reshape_and_cache(
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor | None,  # [num_blocks, num_kv_heads, block_size, head_dim]
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    key_scale: torch.Tensor | None = None,  # [num_kv_heads]
    value_scale: torch.Tensor | None = None,  # [num_kv_heads]
) -> None:
    """Write keys and values to their slots; tokens and heads may lie apart, as in a fused projection."""
    num_tokens, num_heads, head_dim = key.shape
    block_size = key_cache.shape[2]
    whole = (block_size * head_dim, head_dim, 1)
    if any(cache.stride()[1:] != whole for cache in (key_cache, value_cache) if cache is not None):
        raise ValueError("Each block must be contiguous.")
    key = with_whole_heads(key)
    value = None if value is None else with_whole_heads(value)
    num_tensors = 1 if value is None else 2
    padded_dim = triton.next_power_of_2(head_dim)
    tile_heads = min(triton.next_power_of_2(num_heads), max(1, _TILE_SIZE // padded_dim))
    launch(
        _reshape_and_cache_kernel,
        (num_tokens, triton.cdiv(num_heads, tile_heads), num_tensors),
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale,
        value_scale,
        *key.stride()[:2],
        *(key if value is None else value).stride()[:2],
        key_cache.stride(0),
        (key_cache if value_cache is None else value_cache).stride(0),
        num_heads,
        num_warps=NUM_WARPS,
        launch_pdl=supports_dependent_launch(key.device),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        TILE_HEADS=tile_heads,
    )
