"""Rotary embeddings at the shapes of a 1B Llama, as a ratio to a copy of query and key."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from llmstack_kernels.rotary_embedding import rotary_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 32, 512])
def bench_rotary_embedding(benchmark: Any, num_tokens: int, dtype: torch.dtype) -> None:
    query, key = (torch.randn(num_tokens, num_heads, 64).to(dtype) for num_heads in (32, 4))
    positions = torch.randint(0, 2048, (num_tokens,))
    cos_sin_cache = torch.randn(2048, 64)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        query.clone()
        key.clone()
        times.append(time.perf_counter() - start)
    benchmark(rotary_embedding, positions, query, key, cos_sin_cache)
    benchmark.extra_info["time over a copy"] = benchmark.stats["median"] / statistics.median(times)
