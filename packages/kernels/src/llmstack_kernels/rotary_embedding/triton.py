"""Rotary position embedding on a GPU."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmstack_kernels.dependent_launch import wait_for_previous
from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.tiles import NUM_WARPS, head_constants, store_rotated_heads, with_whole_heads


@triton.jit
def _rotary_embedding_kernel(
    positions,  # [num_tokens] int64
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key,  # [num_tokens, num_kv_heads, HEAD_DIM]
    cos_sin_cache,  # [max_positions, 2 * HALF] float32
    query_out,  # [num_tokens, num_heads, HEAD_DIM]
    key_out,  # [num_tokens, num_kv_heads, HEAD_DIM]
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    num_heads,
    num_kv_heads,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NUM_TILE_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_query_tiles = tl.cdiv(num_heads, NUM_TILE_HEADS)
    wait_for_previous()
    position = tl.load(positions + token)
    if tile < num_query_tiles:
        x, out = query + token * query_stride, query_out + token * num_heads * HEAD_DIM
        store_rotated_heads(
            x, out, None, None, 0.0, cos_sin_cache, position, tile, query_head_stride, HEAD_DIM, num_heads,
            HEAD_DIM, HALF, NUM_TILE_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        x, out = key + token * key_stride, key_out + token * num_kv_heads * HEAD_DIM
        store_rotated_heads(
            x, out, None, None, 0.0, cos_sin_cache, position, tile - num_query_tiles, key_head_stride, HEAD_DIM,
            num_kv_heads, HEAD_DIM, HALF, NUM_TILE_HEADS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def rotary_embedding(
    positions: torch.Tensor,  # [num_tokens] int64
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    cos_sin_cache: torch.Tensor,  # [max_positions, rotary_dim] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates query and key; tokens and heads may be strided, as slices of a fused projection are."""
    query, key = with_whole_heads(query), with_whole_heads(key)
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    constants = head_constants(head_dim, cos_sin_cache.shape[1])
    num_tile_heads = constants["NUM_TILE_HEADS"]
    launch(
        _rotary_embedding_kernel,
        (num_tokens, triton.cdiv(num_heads, num_tile_heads) + triton.cdiv(num_kv_heads, num_tile_heads)),
        positions,
        query,
        key,
        cos_sin_cache,
        query_out,
        key_out,
        *query.stride()[:2],
        *key.stride()[:2],
        num_heads,
        num_kv_heads,
        num_warps=NUM_WARPS,
        launch_pdl=supports_dependent_launch(query.device),
        **constants,
    )
    return query_out, key_out
