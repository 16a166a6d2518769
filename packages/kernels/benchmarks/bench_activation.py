"""Activations at GPT-2's and a small Llama's shapes, as a ratio to a copy of their output."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmstack_kernels.activation import gelu_tanh, silu_and_mul


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 32, 512])
@pytest.mark.parametrize(("function", "size"), [(gelu_tanh, 3072), (silu_and_mul, 2 * 2048)])
def bench_activation(
    benchmark: Any, function: Callable[[torch.Tensor], torch.Tensor], size: int, num_rows: int, dtype: torch.dtype
) -> None:
    x = torch.randn(num_rows, size).to(dtype)
    out = function(x)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        out.clone()
        times.append(time.perf_counter() - start)
    benchmark(function, x)
    benchmark.extra_info["time over a copy of the output"] = benchmark.stats["median"] / statistics.median(times)
