"""Layer norms, as a ratio to a copy of the rows."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from llmstack_kernels.layer_norm import layer_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 32, 512])
def bench_layer_norm(benchmark: Any, num_rows: int, dtype: torch.dtype) -> None:
    x, bias, weight = (torch.randn(shape).to(dtype) for shape in ((num_rows, 768), (768,), (768,)))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        x.clone()
        times.append(time.perf_counter() - start)
    benchmark(layer_norm, x, weight, bias, 1e-5)
    benchmark.extra_info["time over a copy of the rows"] = benchmark.stats["median"] / statistics.median(times)
