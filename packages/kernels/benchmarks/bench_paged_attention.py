"""Paged attention at GPT-2's shapes, as a ratio to PyTorch's attention over keys that lie gathered already.

The peer has no blocks to gather and gets its padded tensors for free: it is a limit, not an equal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels.paged_attention import paged_attention, plan_paged_attention

NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 64, 16
BATCHES = {
    "1 decode of 256": [(1, 256)],
    "32 decodes of 256": [(1, 256)] * 32,
    "32 decodes of 16 to 512": [(1, 16 * (1 + row)) for row in range(32)],
    "1 prefill of 512": [(512, 512)],
    "8 prefills of 128": [(128, 128)] * 8,
    "a chunk of 128 after 384": [(128, 512)],
}


def median_s(function: Callable[[], object], num_rounds: int = 15) -> float:
    function()
    times = []
    for _ in range(num_rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_kv_heads", [12, 4])
@pytest.mark.parametrize("batch", BATCHES)
def bench_paged_attention(benchmark: Any, batch: str, num_kv_heads: int, dtype: torch.dtype) -> None:
    rows = BATCHES[batch]
    counts = [seq_len // BLOCK_SIZE for _, seq_len in rows]
    num_blocks = sum(counts)
    key_cache, value_cache = (torch.randn(num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM).to(dtype) for _ in range(2))
    block_ids = torch.randperm(num_blocks).to(torch.int32)
    block_tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        block_tables[row, :count] = block_ids[sum(counts[:row]) :][:count]
    starts = [sum(num_tokens for num_tokens, _ in rows[:row]) for row in range(len(rows) + 1)]
    query = torch.randn(starts[-1], NUM_HEADS, HEAD_DIM).to(dtype)
    keywords = {"query_start_loc_list": starts, "seq_lens_list": [seq_len for _, seq_len in rows]}
    plan = plan_paged_attention(key_cache, block_tables, **keywords)
    tables = (torch.tensor(starts), torch.tensor(keywords["seq_lens_list"]), block_tables)

    def run() -> torch.Tensor:
        return paged_attention(query, key_cache, value_cache, *tables, HEAD_DIM**-0.5, **keywords, plan=plan)

    longest, most = max(seq_len for _, seq_len in rows), max(num_tokens for num_tokens, _ in rows)
    dense_query = torch.randn(len(rows), NUM_HEADS, most, HEAD_DIM).to(dtype)
    dense_keys, dense_values = (torch.randn(len(rows), num_kv_heads, longest, HEAD_DIM).to(dtype) for _ in range(2))
    mask = torch.zeros(most, longest, dtype=dtype)

    def peer() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            dense_query, dense_keys, dense_values, attn_mask=mask, enable_gqa=num_kv_heads != NUM_HEADS
        )

    with torch.inference_mode():
        peer_s = median_s(peer)
        benchmark(run)
        planning_s = median_s(lambda: plan_paged_attention(key_cache, block_tables, **keywords))
    benchmark.extra_info["time over dense scaled_dot_product_attention"] = benchmark.stats["median"] / peer_s
    benchmark.extra_info["plan, once per step, in us"] = planning_s * 1e6
