"""Weights rounded to integers by native code, as a ratio to PyTorch's operations."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from llmstack_kernels.linear import native, quantization
from llmstack_kernels.native import require_library


@pytest.mark.parametrize("scheme", ["int4", "int8"])
@pytest.mark.parametrize("shape", [(2048, 2048), (2048, 5632)], ids=str)
def bench_rounding(benchmark: Any, shape: tuple[int, int], scheme: str) -> None:
    weight = torch.randn(shape).bfloat16()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        quantization.quantize(weight, scheme)
        times.append(time.perf_counter() - start)
    benchmark(native.quantize, weight, scheme)
    median_s = benchmark.stats["median"]
    benchmark.extra_info["kernels"] = require_library().variant
    benchmark.extra_info["speed over PyTorch"] = statistics.median(times) / median_s
    benchmark.extra_info["ns per weight"] = median_s * 1e9 / weight.numel()
