"""RMS norms, as a ratio to a copy of the rows."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from llmstack_kernels.rms_norm import fused_add_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 32, 512])
def bench_fused_add_rms_norm(benchmark: Any, num_rows: int, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((num_rows, 768), (num_rows, 768), (768,)))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        x.clone()
        times.append(time.perf_counter() - start)
    benchmark(fused_add_rms_norm, x, residual, weight, 1e-6)
    benchmark.extra_info["time over a copy of the rows"] = benchmark.stats["median"] / statistics.median(times)
