"""Paged attention against what the processor can do: memory read in sequence, linear layers, and the PyTorch backend.

A decode does little with much memory, a prefill much with little. Each batch of decodes has several caches, so that
none finds its keys in the processor's cache because the one before read them. Times are processor time of one thread,
the least of many: other processes then disturb less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch

from llmstack_kernels.linear import pack_linear
from llmstack_kernels.paged_attention import AttentionInputs, cpu, paged_attention, plan_paged_attention

BLOCK_SIZE = 16
COLD_BYTES = 100 << 20  # of caches: more than a processor keeps
LATENT = (576, 512)  # numbers of a key, and those of a value with which it begins: DeepSeek's
LATENT_BATCHES = {"1 decode of 4096": (1, 4096), "8 decodes of 1024": (8, 1024)}
# Query heads, KV heads, head_dim.
SHAPES = {"GPT-2": (12, 12, 64), "8B": (32, 8, 128)}
BATCHES = {
    f"{num_rows} decodes of {context}": [(1, context)] * num_rows
    for num_rows in (1, 8, 32, 64)
    for context in (256, 1024)
} | {
    "32 decodes of 16 to 512": [(1, 16 * (1 + row)) for row in range(32)],
    "prefill of 512": [(512, 512)],
    "prefill of 900": [(900, 900)],
    "8 prefills of 128": [(128, 128)] * 8,
    "a chunk of 128 after 384": [(128, 512)],
}


def least_s(function: Callable[[], object], num_rounds: int = 12) -> float:
    """Processor time of the quickest call."""
    times = []
    for _ in range(num_rounds + 1):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    return torch.ones(COLD_BYTES // 4)


def flops(dtype: torch.dtype) -> float:
    """What linear layers reach, per second."""
    x, layer = torch.randn(512, 768).to(dtype), pack_linear(torch.randn(768, 768).to(dtype), None)
    return 2 * x.numel() * 768 / least_s(lambda: layer(x))


def make_calls(
    rows: list[tuple[int, int]], shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[list[tuple[torch.Tensor, ...]], dict[str, list[int]]]:
    """Positional arguments of each call, one per pair of caches, and the keywords they share."""
    num_heads, num_kv_heads, head_dim = shape
    counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in rows]
    ends = list(accumulate(counts))
    starts = [0, *accumulate(num_tokens for num_tokens, _ in rows)]
    seq_lens = [seq_len for _, seq_len in rows]
    block_ids = torch.randperm(ends[-1]).to(torch.int32)
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
        tables[row, :count] = block_ids[end - count : end]
    cache_shape = (ends[-1], num_kv_heads, BLOCK_SIZE, head_dim)
    query = torch.randn(starts[-1], num_heads, head_dim).to(dtype)
    num_bytes = 2 * torch.Size(cache_shape).numel() * dtype.itemsize
    num_pairs = max(1, COLD_BYTES // num_bytes) if starts[-1] == len(rows) else 1
    pairs = [[torch.randn(cache_shape).to(dtype) for _ in range(2)] for _ in range(min(num_pairs, 32))]
    ints = (torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32), tables)
    return [(query, *pair, *ints) for pair in pairs], {"query_start_loc_list": starts, "seq_lens_list": seq_lens}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", BATCHES)
def bench_paged_attention(benchmark: Any, memory: torch.Tensor, batch: str, shape: str, dtype: torch.dtype) -> None:
    rows, (num_heads, num_kv_heads, head_dim) = BATCHES[batch], SHAPES[shape]
    calls, keywords = make_calls(rows, SHAPES[shape], dtype)

    def run(function: Callable[..., torch.Tensor], plan: object) -> None:
        for call in calls:
            function(AttentionInputs(*call, head_dim**-0.5, plan=plan, **keywords))

    own_plan = plan_paged_attention(calls[0][1], calls[0][5], **keywords)
    cpu_plan = cpu.make_plan(calls[0][1], calls[0][5], *keywords.values(), None)
    benchmark.pedantic(run, (paged_attention, own_plan), rounds=3, warmup_rounds=1)
    own_s = least_s(lambda: run(paged_attention, own_plan)) / len(calls)
    cpu_s = least_s(lambda: run(cpu.paged_attention, cpu_plan), 5) / len(calls)
    num_bytes = 2 * sum(keywords["seq_lens_list"]) * num_kv_heads * head_dim * dtype.itemsize
    num_pairs = sum(sum(range(seq_len - num_tokens + 1, seq_len + 1)) for num_tokens, seq_len in rows)
    benchmark.extra_info |= {
        "us": own_s * 1e6,
        "PyTorch backend over it": cpu_s / own_s,
        "of memory's speed in sequence": num_bytes / own_s / (memory.nbytes / least_s(memory.sum)),
        "of linear layers' speed": 4 * num_pairs * num_heads * head_dim / own_s / flops(dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads", [1, 2, 4, 8, 16, 128])
@pytest.mark.parametrize("batch", LATENT_BATCHES)
def bench_latent_attention(benchmark: Any, batch: str, num_heads: int, dtype: torch.dtype) -> None:
    """A latent is read once for all heads: their number decides whether reading or multiplying takes longer."""
    num_rows, context = LATENT_BATCHES[batch]
    num_blocks = num_rows * context // BLOCK_SIZE
    num_bytes = num_blocks * BLOCK_SIZE * LATENT[0] * dtype.itemsize
    caches = [torch.randn(num_blocks, 1, BLOCK_SIZE, LATENT[0]).to(dtype) for _ in range(COLD_BYTES // num_bytes)]
    query = torch.randn(num_rows, num_heads, LATENT[0]).to(dtype)
    rows = (
        torch.arange(num_rows + 1, dtype=torch.int32),
        torch.full((num_rows,), context, dtype=torch.int32),
        torch.randperm(num_blocks).to(torch.int32).view(num_rows, -1),
    )

    def run() -> None:
        for cache in caches:
            paged_attention(
                AttentionInputs(query, cache, cache[..., : LATENT[1]], *rows, LATENT[0] ** -0.5, max_query_len=1)
            )

    benchmark.pedantic(run, rounds=3, warmup_rounds=1)
    memory = torch.ones(COLD_BYTES // 4)
    own_s, read_s = least_s(run) / len(caches), least_s(memory.sum) * num_bytes / memory.nbytes
    multiply_s = 2 * num_rows * context * num_heads * (LATENT[0] + LATENT[1]) / flops(dtype)
    benchmark.extra_info |= {
        "us": own_s * 1e6,
        "over reading": own_s / read_s,
        "over multiplying": own_s / multiply_s,
        "over the bound": own_s / max(read_s, multiply_s),
    }
