"""Cost of bit-equal logits: batch-invariant kernels against the fastest others, at GPT-2's shapes.

Linear layers are compared with oneDNN's packed weights, attention with PyTorch's over gathered keys and values. Both
are measured alternately, so that a busy machine slows both. `cost` below 0 means that batch invariance is faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmstack_kernels.linear import native as native_linear
from llmstack_kernels.native import library
from llmstack_kernels.paged_attention import AttentionInputs
from llmstack_kernels.paged_attention import cpu as gathered_attention
from llmstack_kernels.paged_attention import native as native_attention

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")

NUM_LAYERS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 12, 64, 16
SIZE = NUM_HEADS * HEAD_DIM
CONTEXT = 256
# Of one layer: inputs and outputs.
SHAPES = [(SIZE, 3 * SIZE), (SIZE, SIZE), (SIZE, 4 * SIZE), (4 * SIZE, SIZE)]
NUM_ROUNDS = 9
# Rows of tokens to compute and length of the context.
BATCHES = {f"{n} decodes": [(1, CONTEXT)] * n for n in (1, 8, 32)} | {"prefill": [(512, 512)]}

Step = Callable[[], object]


def linear_steps(num_tokens: int, dtype: torch.dtype) -> tuple[Step, Step]:
    """All linear layers, native and by oneDNN, with weights of their own for every layer, as in a model."""
    weights = [torch.randn(o, i).div_(i**0.5).to(dtype) for _ in range(NUM_LAYERS) for i, o in SHAPES]
    inputs = {size: torch.randn(num_tokens, size).to(dtype) for size in {size for size, _ in SHAPES}}

    native = [native_linear.pack_linear(weight, None) for weight in weights]
    reordered = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]

    def run_onednn() -> None:  # not through our layer, which computes one row as two
        for weight, packed in zip(weights, reordered, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[weight.shape[1]], packed, None, "none", [], "")

    return lambda: [layer(inputs[layer.in_features]) for layer in native], run_onednn


def attention_steps(batch: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Step, Step]:
    """All layers' attention, native and by PyTorch, whose plan of the step is made once as in a model."""
    starts = [sum(num_tokens for num_tokens, _ in batch[:row]) for row in range(len(batch) + 1)]
    seq_lens = [seq_len for _, seq_len in batch]
    row_blocks = max(seq_lens) // BLOCK_SIZE
    num_blocks = row_blocks * len(batch)
    block_tables = torch.randperm(num_blocks).to(torch.int32).view(len(batch), row_blocks)
    caches = [
        tuple(torch.randn(num_blocks, NUM_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype) for _ in range(2))
        for _ in range(NUM_LAYERS)
    ]
    query = torch.randn(starts[-1], NUM_HEADS, HEAD_DIM).to(dtype)
    tables = (torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32), block_tables)
    lists = {"query_start_loc_list": starts, "seq_lens_list": seq_lens}

    def step(module: Any) -> None:
        has_plan = hasattr(module, "make_plan")
        plan = module.make_plan(caches[0][0], block_tables, starts, seq_lens, None) if has_plan else None
        for keys, values in caches:
            module.paged_attention(AttentionInputs(query, keys, values, *tables, HEAD_DIM**-0.5, **lists, plan=plan))

    return lambda: step(native_attention), lambda: step(gathered_attention)


def medians_ms(steps: tuple[Step, Step]) -> tuple[float, float]:
    """Median duration of each, measured in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_index in range(NUM_ROUNDS + 1):
        for step, found in zip(steps, times, strict=True):
            start = time.perf_counter()
            step()
            if round_index:  # the first warms up
                found.append(time.perf_counter() - start)
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def bench_numeric_contract(benchmark: Any, batch: str, dtype: torch.dtype) -> None:
    """The linear layers and the attention of one step."""
    rows = BATCHES[batch]
    with torch.inference_mode():
        linears = linear_steps(sum(num_tokens for num_tokens, _ in rows), dtype)
        attentions = attention_steps(rows, dtype)
        native_linear_ms, onednn_ms = medians_ms(linears)
        native_attention_ms, gathered_ms = medians_ms(attentions)
        benchmark.pedantic(lambda: (linears[0](), attentions[0]()), rounds=3)
    fastest_ms = min(native_linear_ms, onednn_ms) + min(native_attention_ms, gathered_ms)
    benchmark.extra_info |= {
        "linear, time over oneDNN's": native_linear_ms / onednn_ms,
        "attention, time over PyTorch's": native_attention_ms / gathered_ms,
        "cost against the other path": (native_linear_ms + native_attention_ms) / (onednn_ms + gathered_ms) - 1,
        "cost against the fastest of each": (native_linear_ms + native_attention_ms) / fastest_ms - 1,
    }
