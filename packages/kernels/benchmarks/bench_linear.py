"""Packed linear layers at GPT-2's shapes, as a ratio to `F.linear`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels.linear import pack_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(768, 3072), (3072, 768), (768, 50257)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 32, 512])
def bench_linear(benchmark: Any, num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    in_features, out_features = shape
    x, weight = torch.randn(num_rows, in_features).to(dtype), torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    with torch.inference_mode():
        packed = pack_linear(weight, bias)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            F.linear(x, weight, bias)
            times.append(time.perf_counter() - start)
        benchmark(packed, x)
    median_s = benchmark.stats["median"]
    benchmark.extra_info["speed over F.linear"] = statistics.median(times) / median_s
    benchmark.extra_info["GFLOP/s"] = 2 * num_rows * in_features * out_features / median_s / 1e9
    benchmark.extra_info["weight GB/s"] = weight.nbytes / median_s / 1e9
