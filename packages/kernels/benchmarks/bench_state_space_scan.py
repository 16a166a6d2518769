"""The scan of Mamba-2, as a ratio to what limits decodes: a copy of the states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.benchmark import Timer

from llmstack_kernels.state_rows import StateRows
from llmstack_kernels.state_space_scan import ScanInputs, state_space_scan

NUM_HEADS, HEAD_DIM, STATE_SIZE = 128, 64, 128  # of Granite 4 H Small


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 1), (8, 1), (1, 256)], ids=["decode", "8 decodes", "prompt"])
def bench_state_space_scan(benchmark: Any, num_rows: int, num_tokens: int) -> None:
    count = num_rows * num_tokens
    mixed = torch.randn(count, NUM_HEADS * HEAD_DIM + 2 * STATE_SIZE)
    inputs = ScanInputs(mixed, torch.randn(count, NUM_HEADS), *torch.randn(3, NUM_HEADS), 1)
    states, sources = torch.randn(2 * num_rows, NUM_HEADS, STATE_SIZE, HEAD_DIM), torch.arange(num_rows)
    starts = torch.arange(num_rows + 1, dtype=torch.int32) * num_tokens
    rows = StateRows(starts, sources, sources + num_rows, torch.full((num_rows,), num_tokens))
    benchmark(state_space_scan, inputs, states, rows)
    names = {"states": states, "num_rows": num_rows}
    copied = Timer("states[num_rows:].copy_(states[:num_rows])", globals=names).timeit(7).mean
    benchmark.extra_info["time over a copy of the states, per token"] = benchmark.stats["median"] / copied / num_tokens
