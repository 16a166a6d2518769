"""Calls of attention over latents, and the same in float64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from llmstack_kernels.paged_attention import AttentionInputs

Rows = list[tuple[int, int]]  # (tokens computed in this step, context length)
TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def make_inputs(
    rows: Rows, num_heads: int, sizes: tuple[int, int], dtype: torch.dtype, block_size: int = 16
) -> AttentionInputs:
    width, rank = sizes
    generator = torch.Generator().manual_seed(0)
    counts = [-(-seq_len // block_size) for _, seq_len in rows]
    block_ids = torch.randperm(sum(counts) + 1, generator=generator).to(torch.int32)
    tables = torch.zeros(len(rows), max(counts), dtype=torch.int32)
    for row, end in enumerate(accumulate(counts)):
        tables[row, : counts[row]] = block_ids[end - counts[row] : end]
    cache = torch.randn(len(block_ids), 1, block_size, width, generator=generator).to(dtype)
    starts = [0, *accumulate(num_tokens for num_tokens, _ in rows)]
    lengths = [seq_len for _, seq_len in rows]
    return AttentionInputs(
        torch.randn(starts[-1], num_heads, width, generator=generator).to(dtype),
        cache,
        cache[..., :rank],
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        tables,
        width**-0.5,
        query_start_loc_list=starts,
        seq_lens_list=lengths,
    )


def exact(inputs: AttentionInputs) -> torch.Tensor:
    """The same in float64, a row at a time."""
    starts, lengths = inputs.query_start_loc.tolist(), inputs.seq_lens.tolist()
    rank, block_size = inputs.value_cache.shape[3], inputs.key_cache.shape[2]
    outs = []
    for row, (start, end) in enumerate(pairwise(starts)):
        blocks = inputs.block_tables[row, : -(-lengths[row] // block_size)].long()
        context = inputs.key_cache[blocks].double().reshape(-1, inputs.key_cache.shape[3])[: lengths[row]]
        scores = torch.einsum("thd,kd->htk", inputs.query[start:end].double(), context) * inputs.scale
        positions = torch.arange(lengths[row])
        hidden = positions > positions[lengths[row] - (end - start) :, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("htk,kd->thd", weights, context[:, :rank]))
    return torch.cat(outs)
