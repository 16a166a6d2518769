"""The gated delta rule, as a ratio to what limits it.

That is a copy of the matrices in decodes, and products of floats in prompts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmstack_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from llmstack_kernels.state_rows import StateRows

NUM_KEY_HEADS, NUM_HEADS, SIZE = 16, 32, 128  # of Qwen3-Next


def median_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (8, 1), (1, 256)], ids=["decode", "8 decodes", "prompt"])
def bench_gated_delta_rule(benchmark: Any, num_rows: int, num_tokens: int) -> None:
    count = num_rows * num_tokens
    inputs = DeltaRuleInputs(
        torch.randn(count, (2 * NUM_KEY_HEADS + NUM_HEADS) * SIZE), *torch.randn(2, count, NUM_HEADS),
        *torch.randn(2, NUM_HEADS), NUM_KEY_HEADS,
    )  # fmt: skip
    matrices = torch.randn(2 * num_rows, NUM_HEADS, SIZE, SIZE)
    sources = torch.arange(num_rows)
    starts = torch.arange(num_rows + 1, dtype=torch.int32) * num_tokens
    rows = StateRows(starts, sources, sources + num_rows, torch.full((num_rows,), num_tokens))
    benchmark(gated_delta_rule, inputs, matrices, rows)
    seconds = benchmark.stats["median"]
    copied = median_seconds(lambda: matrices[num_rows:].copy_(matrices[:num_rows]))
    benchmark.extra_info["time over a copy of the matrices"] = seconds / copied
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    per_product = median_seconds(lambda: left @ right) / 1024**3
    # Of each number of a matrix: the decay, the update, the answer and the next prediction.
    products = 4 * count * NUM_HEADS * SIZE * SIZE
    benchmark.extra_info["time over as many products of a matrix product"] = seconds / (products * per_product)
