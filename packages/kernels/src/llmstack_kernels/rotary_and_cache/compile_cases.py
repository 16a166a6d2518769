"""Rotary embedding and KV write of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.rotary_and_cache import triton as kernels

_NUM_TOKENS = 64
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def cases() -> Iterator[CompileCase]:
    """Heads of Llama 8B and 1B, and Phi-2's, of which a part is turned; keys and values of 8 bits."""
    for name, num_heads, num_kv_heads, head_dim, rotary_dim in (
        ("8b", 32, 8, 128, 128),
        ("1b", 32, 8, 64, 64),
        ("phi2", 32, 32, 80, 32),
    ):
        inputs = _inputs(num_heads, num_kv_heads, head_dim, rotary_dim)
        cache = _empty(1024, num_kv_heads, 16, head_dim)
        call = partial(kernels.rotary_and_cache, *inputs, cache, cache, _indices())
        yield CompileCase(f"{name}_bf16", call, name == "8b", {"_rotary_and_cache_kernel": ("pdl",)})
    inputs, cache, norm = _inputs(32, 8, 128, 128), _empty(1024, 8, 16, 128), _empty(128)
    call = partial(
        kernels.rotary_and_cache, *inputs, cache, cache, _indices(), query_norm=norm, key_norm=norm, eps=1e-6
    )
    yield CompileCase("qwen3_8b_bf16", call)
    scale = _empty(8, dtype=torch.float32)
    cache = _empty(1024, 8, 16, 128, dtype=torch.float8_e4m3fn)
    inputs = _inputs(32, 8, 128, 128)
    call = partial(kernels.rotary_and_cache, *inputs, cache, cache, _indices(), scale, scale)
    yield CompileCase("8b_bf16_fp8", call, min_arch=90)


def _inputs(num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int) -> _Inputs:
    qkv = _empty(_NUM_TOKENS, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return _indices(), query, key, value, _empty(8192, rotary_dim, dtype=torch.float32)


def _indices() -> torch.Tensor:
    return _empty(_NUM_TOKENS, dtype=torch.int64)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
