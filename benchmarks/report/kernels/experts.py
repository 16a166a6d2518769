"""Linear layers of experts, at a mixture's shapes, beside one read of the weights that the rows need."""

from __future__ import annotations

from functools import partial

import torch

from llmstack_kernels.grouped_linear import group_rows, grouped_linear, pack_experts
from report.bench import Bench
from report.rows import Row
from report.timing import time_calls

NUM_EXPERTS, NUM_CHOICES = 8, 2
NUM_TOKENS = (1, 8, 64, 256, 2048)


def run(bench: Bench) -> None:
    """The first product of 8 experts of 14336 x 4096, two for each token."""
    out_features, in_features = bench.pick((2 * 14336, 4096), (64, 64))
    weights = torch.empty(NUM_EXPERTS, out_features, in_features, dtype=bench.dtype, device=bench.device)
    packed = pack_experts(weights.normal_(0, 0.02))
    for num_tokens in NUM_TOKENS:
        title = f"experts 8 x {2 * 14336}x4096 bf16, {num_tokens} tokens"
        bench.attempt(title, "GB/s", partial(_measure, bench, packed, weights, bench.pick(num_tokens, 2), title))


def choose_experts(bench: Bench, num_tokens: int) -> torch.Tensor:
    """Two different ones for each token: int64 [num_tokens, NUM_CHOICES]."""
    return torch.rand(num_tokens, NUM_EXPERTS, device=bench.device).topk(NUM_CHOICES).indices


def _measure(bench: Bench, packed: object, weights: torch.Tensor, num_tokens: int, title: str) -> Row:
    """Grouping is part of it: every layer of experts has to."""
    expert_ids = choose_experts(bench, num_tokens)
    x = torch.randn(num_tokens, weights.shape[2], dtype=bench.dtype, device=bench.device)

    def compute() -> torch.Tensor:
        return grouped_linear(x, packed, group_rows(expert_ids, NUM_EXPERTS))

    timing = time_calls(bench, [compute])
    num_bytes = len(expert_ids.unique()) * weights[0].nbytes
    flops = 2 * expert_ids.numel() * weights[0].numel()
    read, product = bench.ceilings.get("read GB/s"), bench.ceilings.get("bf16 product TFLOP/s")
    note = f"{timing.median_s * 1e6:.1f} us"
    if read and product and flops / product / 1e12 > num_bytes / read / 1e9:
        return Row(title, "TFLOP/s", flops / timing.median_s / 1e12, product, note=note)
    return Row(title, "GB/s", num_bytes / timing.median_s / 1e9, read, note=note)
