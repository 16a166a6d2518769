"""KV writes at GPT-2's shapes, as a ratio to copying the same bytes to one place."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from llmstack_kernels.reshape_and_cache import reshape_and_cache


@pytest.mark.parametrize("num_tokens", [1, 32, 512])
def bench_reshape_and_cache(benchmark: Any, num_tokens: int) -> None:
    key_cache = torch.zeros(512, 12, 16, 64, dtype=torch.bfloat16)
    value_cache = torch.zeros_like(key_cache)
    key, value = (torch.randn(num_tokens, 12, 64).bfloat16() for _ in range(2))
    slot_mapping = torch.randperm(512 * 16)[:num_tokens]
    target = torch.empty(2, *key.shape, dtype=key.dtype)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        target[0].copy_(key)
        target[1].copy_(value)
        times.append(time.perf_counter() - start)
    benchmark(reshape_and_cache, key, value, key_cache, value_cache, slot_mapping)
    benchmark.extra_info["time over a plain copy"] = benchmark.stats["median"] / statistics.median(times)
