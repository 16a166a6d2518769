"""The scan of Mamba-1, as a ratio to what limits decodes: a copy of the states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.benchmark import Timer

from llmstack_kernels.selective_scan import SelectiveInputs, selective_scan
from llmstack_kernels.state_rows import StateRows

NUM_CHANNELS, STATE_SIZE = 8192, 16  # of Falcon Mamba 7B


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (8, 1), (1, 256)], ids=["decode", "8 decodes", "prompt"])
def bench_selective_scan(benchmark: Any, num_rows: int, num_tokens: int) -> None:
    count = num_rows * num_tokens
    x, steps = torch.randn(2, count, NUM_CHANNELS)
    taken, asked = torch.randn(2, count, STATE_SIZE)
    speeds = torch.randn(STATE_SIZE, NUM_CHANNELS)
    inputs = SelectiveInputs(x, steps, taken, asked, speeds, *torch.randn(2, NUM_CHANNELS))
    states, sources = torch.randn(2 * num_rows, STATE_SIZE, NUM_CHANNELS), torch.arange(num_rows)
    starts = torch.arange(num_rows + 1, dtype=torch.int32) * num_tokens
    rows = StateRows(starts, sources, sources + num_rows, torch.full((num_rows,), num_tokens))
    benchmark(selective_scan, inputs, states, rows)
    names = {"states": states, "num_rows": num_rows}
    copied = Timer("states[num_rows:].copy_(states[:num_rows])", globals=names).timeit(7).mean
    benchmark.extra_info["time over a copy of the states, per token"] = benchmark.stats["median"] / copied / num_tokens
