"""KV writes of models as they are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import Claim, CompileCase
from llmstack_kernels.reshape_and_cache import triton as kernels


def cases() -> Iterator[CompileCase]:
    """Keys and values as slices of the projections of GPT-2 and Llama 8B; the latter into 8 bits, too."""
    pdl: dict[str, tuple[Claim, ...]] = {"_reshape_and_cache_kernel": ("pdl",)}
    gpt2, llama = (_empty(64, 36, 64), 12, 12), (_empty(64, 48, 128), 32, 8)
    yield CompileCase("gpt2_bf16", partial(_write, *gpt2, torch.bfloat16), claims=pdl)
    yield CompileCase("8b_bf16", partial(_write, *llama, torch.bfloat16), True, pdl)
    yield CompileCase("8b_bf16_fp8_cache", partial(_write, *llama, torch.float8_e4m3fn), claims=pdl, min_arch=90)


def _write(projection: torch.Tensor, num_heads: int, num_kv_heads: int, cache_dtype: torch.dtype) -> None:
    key = projection[:, num_heads : num_heads + num_kv_heads]
    value = projection[:, num_heads + num_kv_heads :]
    cache = _empty(4096, num_kv_heads, 16, projection.shape[2], dtype=cache_dtype)
    scales = _empty(num_kv_heads, dtype=torch.float32) if cache_dtype == torch.float8_e4m3fn else None
    slots = _empty(projection.shape[0], dtype=torch.int64)
    kernels.reshape_and_cache(key, value, cache, cache, slots, scales, scales)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
