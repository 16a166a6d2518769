"""Rotary embedding and KV write on a GPU in one kernel.

A rotated key is written to its slot alone, never to memory of its own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.rms_norm.triton import rms_norm
from llmstack_kernels.rotary_inputs import RotaryInputs
from llmstack_kernels.tiles import (
    NUM_WARPS,
    head_constants,
    store_heads,
    store_rotated_heads,
    with_whole_heads,
)


@triton.jit
def _rotary_and_cache_kernel(
    positions,  # [num_tokens] int64
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key,  # [num_tokens, num_kv_heads, HEAD_DIM]
    value,  # [num_tokens, num_kv_heads, HEAD_DIM]
    cos_sin_cache,  # [max_positions, 2 * HALF] float32
    out,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    value_cache,  # [num_blocks, num_kv_heads, block_size, HEAD_DIM]
    slot_mapping,  # [num_tokens] int64
    key_scale,  # [num_kv_heads] float32, or None
    value_scale,  # [num_kv_heads] float32, or None
    query_norm,  # [HEAD_DIM], or None
    key_norm,  # [HEAD_DIM], or None
    eps,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    key_block_stride,
    value_block_stride,
    num_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NUM_TILE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    NUM_BLOCK_SLOTS: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_query_tiles, num_kv_tiles = tl.cdiv(num_heads, NUM_TILE_HEADS), tl.cdiv(num_kv_heads, NUM_TILE_HEADS)
    wait_for_previous()
    position = tl.load(positions + token)
    slot = tl.load(slot_mapping + token)
    block, offset = slot // NUM_BLOCK_SLOTS, slot % NUM_BLOCK_SLOTS * HEAD_DIM
    slots_size = NUM_BLOCK_SLOTS * HEAD_DIM  # of a head in a block
    num_written_heads = tl.where(slot < 0, 0, num_kv_heads)
    if tile < num_query_tiles:
        store_rotated_heads(
            query + token * query_stride, out + token * num_heads * HEAD_DIM, None, query_norm, eps,
            cos_sin_cache, position, tile, query_head_stride, HEAD_DIM, num_heads,
            HEAD_DIM, HALF, NUM_TILE_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    elif tile < num_query_tiles + num_kv_tiles:
        store_rotated_heads(
            key + token * key_stride, key_cache + block * key_block_stride + offset, key_scale, key_norm, eps,
            cos_sin_cache, position, tile - num_query_tiles, key_head_stride, slots_size, num_written_heads,
            HEAD_DIM, HALF, NUM_TILE_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        store_heads(
            value + token * value_stride, value_cache + block * value_block_stride + offset, value_scale,
            tile - num_query_tiles - num_kv_tiles, value_head_stride, slots_size, num_written_heads,
            0, HEAD_DIM, NUM_TILE_HEADS, BLOCK_HEAD,
        )  # fmt: skip


def rotary_and_cache(inputs: RotaryInputs) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
    """Rotates and writes; tokens and heads may be strided. No block is cleared: attention reads its context only."""
    query, key, value = with_whole_heads(inputs.query), with_whole_heads(inputs.key), with_whole_heads(inputs.value)
    query_norm, key_norm = inputs.query_norm, inputs.key_norm
    key_cache, value_cache = inputs.key_cache, inputs.value_cache
    if query_norm is not None and key_norm is not None and inputs.cos_sin_cache.shape[1] < query.shape[2]:
        query, key = rms_norm(query, query_norm, inputs.eps), rms_norm(key, key_norm, inputs.eps)
        query_norm = key_norm = None
    out = query.new_empty(query.shape)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    slots_are_whole = key_cache.stride()[1:] == value_cache.stride()[1:] == (block_size * head_dim, head_dim, 1)
    if not slots_are_whole:
        raise ValueError("Each block must be contiguous.")
    constants = head_constants(head_dim, inputs.cos_sin_cache.shape[1])
    num_tile_heads = constants["NUM_TILE_HEADS"]
    num_tiles = triton.cdiv(num_heads, num_tile_heads) + 2 * triton.cdiv(num_kv_heads, num_tile_heads)
    launch(
        _rotary_and_cache_kernel,
        (num_tokens, num_tiles),
        inputs.positions,
        query,
        key,
        value,
        inputs.cos_sin_cache,
        out,
        key_cache,
        value_cache,
        inputs.slot_mapping,
        inputs.key_scale,
        inputs.value_scale,
        query_norm,
        key_norm,
        inputs.eps,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        key_cache.stride(0),
        value_cache.stride(0),
        num_heads,
        num_kv_heads,
        num_warps=NUM_WARPS,
        launch_pdl=supports_dependent_launch(query.device),
        NUM_BLOCK_SLOTS=block_size,
        BLOCK_HEAD=triton.next_power_of_2(head_dim),
        **constants,
    )
    return out
