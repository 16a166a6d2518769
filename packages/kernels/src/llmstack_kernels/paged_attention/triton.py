"""Paged attention on a GPU.

Rows of one token go through `triton_decode`, all others through `triton_prefill`. Latents, of which values are a part,
have a kernel of their own, `triton_latent`.

A row's result is bit-equal alone and in any batch, and a prompt's however it is cut into chunks of two tokens or more.
A token that is decoded and the same token within a prompt may differ in the last bits, since their sums are cut
differently, unless decodes go through `triton_prefill` as well: one program then walks over a row's whole context.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton

from llmstack_kernels.paged_attention import reference
from llmstack_kernels.paged_attention.inputs import AttentionInputs
from llmstack_kernels.paged_attention.triton_decode import attend_decodes
from llmstack_kernels.paged_attention.triton_latent import attend_latents, is_latent
from llmstack_kernels.paged_attention.triton_operands import Operands
from llmstack_kernels.paged_attention.triton_prefill import attend_prefills

_HEAD_DIMS = range(9, 257)  # as tiles, of a power of two: 16 to 256
_MAX_GROUP = 128
# Padded numbers of a token's queries that share a KV head, by their bytes: they must fit beside keys and values.
_MAX_QUERY_SIZE = {2: 128 * 256, 4: 128 * 64}


def supports(query: torch.Tensor, key_cache: torch.Tensor) -> bool:
    """Whether the kernels compute these shapes; elsewhere the reference does."""
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    if block_size & (block_size - 1) or head_dim not in _HEAD_DIMS:
        return False
    group = query.shape[1] // num_kv_heads
    query_size = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return bool(group <= _MAX_GROUP and query_size <= _MAX_QUERY_SIZE.get(query.element_size(), 0))


def paged_attention(inputs: AttentionInputs) -> torch.Tensor:  # [num_tokens, num_heads, value_dim]
    """Launches the kernels for the kinds of rows that there may be, without reading a tensor's values."""
    if is_latent(inputs):
        return attend_latents(inputs)
    if inputs.key_cache.shape != inputs.value_cache.shape or not supports(inputs.query, inputs.key_cache):
        return reference.paged_attention(inputs)
    query = inputs.query
    if query.stride()[1:] != (query.shape[2], 1):
        inputs = inputs._replace(query=query.contiguous())
    operands = Operands(inputs, query.new_empty(query.shape))
    has_decodes, has_prefills = _kinds(inputs.query_start_loc_list, inputs.max_query_len)
    if has_decodes and not inputs.decodes_as_prefills:
        attend_decodes(operands)
    if has_prefills or inputs.decodes_as_prefills:
        attend_prefills(operands, has_decodes=inputs.decodes_as_prefills)
    return operands.out


def _kinds(starts: Sequence[int] | None, max_query_len: int | None) -> tuple[bool, bool]:
    """Whether there may be rows of one token, and rows of more."""
    if max_query_len == 1 or starts is None:
        return True, max_query_len != 1
    lengths = {min(end - start, 2) for start, end in pairwise(starts)}
    return 1 in lengths, 2 in lengths
