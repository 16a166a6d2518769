"""Token bitmask, native against reference and against copying the logits."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_kernels import reference
from llmstack_kernels.token_bitmask import apply_token_bitmask

NUM_ROWS, VOCAB_SIZE = 32, 50_257
NUM_WORDS = -(-VOCAB_SIZE // 32)
KINDS = {
    "string": torch.where(torch.rand(NUM_ROWS, NUM_WORDS) < 0.1, 0x7FFF_FF00, -1).to(torch.int32),
    "structure": torch.where(torch.rand(NUM_ROWS, NUM_WORDS) < 0.01, 7, 0).to(torch.int32),
    "random": torch.randint(-(2**31), 2**31, (NUM_ROWS, NUM_WORDS), dtype=torch.int64).to(torch.int32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["chosen", "reference", "copy"])
def test_bench_token_bitmask(benchmark: BenchmarkFixture, kind: str, backend: str) -> None:
    logits, rows = torch.randn(NUM_ROWS, VOCAB_SIZE), torch.arange(NUM_ROWS)
    other = torch.empty_like(logits)
    if backend == "copy":
        benchmark(lambda: other.copy_(logits))
    else:
        apply = apply_token_bitmask if backend == "chosen" else reference.apply_token_bitmask
        benchmark(lambda: apply(logits, rows, KINDS[kind]))
