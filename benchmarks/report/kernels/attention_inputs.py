"""Batches for attention: rows whose blocks lie scattered over one pool, several sets of them to go round."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from llmstack_kernels.paged_attention import AttentionInputs, paged_attention, plan_paged_attention
from report.bench import Bench
from report.floors import ModelShape

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows over a pool of blocks.

    Attributes:
        rows: (tokens of the query, length of the context) of each row.
        tables: Block tables, one set for each copy: int32 [num_rows, max_blocks].
        scales: Of keys and values, float32 [num_kv_heads] each; empty for a pool in the query's type.
    """

    rows: Sequence[tuple[int, int]]
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    start_loc: torch.Tensor
    seq_lens: torch.Tensor
    tables: Sequence[torch.Tensor]
    scales: tuple[torch.Tensor, ...]

    @property
    def starts(self) -> list[int]:
        """Of each row in the query, and its end."""
        return [0, *accumulate(num_tokens for num_tokens, _ in self.rows)]

    @property
    def kv_bytes(self) -> int:
        """What one copy has to read."""
        num_kv_heads, head_dim = self.key_cache.shape[1], self.key_cache.shape[3]
        return 2 * sum(seq_len for _, seq_len in self.rows) * num_kv_heads * head_dim * self.key_cache.element_size()

    def attend(self, copy: int = 0, **options: float) -> torch.Tensor:
        """The operation under test; `options` are `sliding_window` or `soft_cap`."""
        lists = {}
        if self.query.device.type == "cpu":
            lists = {"query_start_loc_list": self.starts, "seq_lens_list": [seq_len for _, seq_len in self.rows]}
        window = {key: int(value) for key, value in options.items() if key == "sliding_window"}
        plan = plan_paged_attention(self.key_cache, self.tables[copy], **lists, **window)
        key_scale, value_scale = self.scales or (None, None)
        return paged_attention(
            AttentionInputs(
                self.query,
                self.key_cache,
                self.value_cache,
                self.start_loc,
                self.seq_lens,
                self.tables[copy],
                self.query.shape[2] ** -0.5,
                max_query_len=max(num_tokens for num_tokens, _ in self.rows),
                key_scale=key_scale,
                value_scale=value_scale,
                plan=plan,
                **lists,
                **options,
            )
        )

    def subset(self, indices: Sequence[int]) -> Batch:
        """Some rows, in another order, over the same pool."""
        parts = [self.query[self.starts[index] : self.starts[index + 1]] for index in indices]
        rows = [self.rows[index] for index in indices]
        chosen = torch.tensor(indices, device=self.query.device)
        starts = torch.tensor([0, *accumulate(n for n, _ in rows)], dtype=torch.int32, device=self.query.device)
        tables = [table[chosen].contiguous() for table in self.tables]
        caches = (self.key_cache, self.value_cache)
        return Batch(rows, torch.cat(parts), *caches, starts, self.seq_lens[chosen], tables, self.scales)


def kv_bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """Of one layer."""
    return 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def make_batch(
    bench: Bench,
    shape: ModelShape,
    rows: Sequence[tuple[int, int]],
    *,
    kv_dtype: torch.dtype | None = None,
    num_copies: int = 1,
    spare_row: int = 0,
) -> Batch:
    """Random queries, keys and values; every copy has blocks of its own, in random order.

    `spare_row` more tokens fit into each row's blocks.
    """
    kv_dtype = kv_dtype or bench.dtype
    shape = bench.pick(shape, _tiny(shape))
    counts = [-(-(seq_len + spare_row) // BLOCK_SIZE) for _, seq_len in rows]
    num_blocks = num_copies * sum(counts)
    pool_shape = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    caches = [_random(bench, pool_shape, kv_dtype) for _ in range(2)]
    block_ids = torch.randperm(num_blocks, device=bench.device).to(torch.int32)
    tables = [_table(block_ids, counts, copy * sum(counts)) for copy in range(num_copies)]
    starts = [0, *accumulate(num_tokens for num_tokens, _ in rows)]
    query = _random(bench, (starts[-1], shape.num_heads, shape.head_dim), bench.dtype)
    start_loc, seq_lens = (
        torch.tensor(values, dtype=torch.int32, device=bench.device) for values in (starts, [n for _, n in rows])
    )
    scale = torch.linspace(0.5, 1.0, shape.num_kv_heads, dtype=torch.float32, device=bench.device)
    scales = (scale, scale.flip(0)) if kv_dtype == torch.float8_e4m3fn else ()
    return Batch(rows, query, caches[0], caches[1], start_loc, seq_lens, tables, scales)


def _tiny(shape: ModelShape) -> ModelShape:
    """Of the same kind: with as many KV heads as heads, or with half of them."""
    return replace(shape, num_heads=2, num_kv_heads=1 if shape.num_kv_heads < shape.num_heads else 2, head_dim=16)


def _random(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    wide = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    return torch.randn(shape, dtype=wide, device=bench.device).to(dtype)


def _table(block_ids: torch.Tensor, counts: Sequence[int], start: int) -> torch.Tensor:
    table = block_ids.new_zeros(len(counts), max(counts))
    for row, count in enumerate(counts):
        table[row, :count] = block_ids[start : start + count]
        start += count
    return table


def ragged_lengths(num_rows: int, longest: int) -> list[int]:
    """Lognormal, 100 to `longest`, the same in every run."""
    draw = random.Random(64)
    return [min(longest, max(min(100, longest), int(draw.lognormvariate(7.4, 1.1)))) for _ in range(num_rows)]


def gathered(batch: Batch, row: int, copy: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a row one after the other, scales applied: float64 [num_kv_heads, seq_len, head_dim]."""
    seq_len = batch.rows[row][1]
    blocks = batch.tables[copy][row, : -(-seq_len // BLOCK_SIZE)].long()
    found = []
    for index, cache in enumerate((batch.key_cache, batch.value_cache)):
        rows = cache[blocks].double().transpose(0, 1).flatten(1, 2)[:, :seq_len]
        found.append(rows * batch.scales[index].double()[:, None, None] if batch.scales else rows)
    return found[0], found[1]


def reference(batch: Batch, sliding_window: float | None = None, soft_cap: float | None = None) -> torch.Tensor:
    """Attention in float64, row by row: [num_tokens, num_heads, head_dim]."""
    parts = [_reference_row(batch, row, sliding_window, soft_cap) for row in range(len(batch.rows))]
    return torch.cat(parts)


def _reference_row(batch: Batch, row: int, sliding_window: float | None, soft_cap: float | None) -> torch.Tensor:
    num_tokens, seq_len = batch.rows[row]
    query = batch.query[batch.starts[row] : batch.starts[row] + num_tokens].double().transpose(0, 1)
    keys, values = (side.repeat_interleave(query.shape[0] // side.shape[0], 0) for side in gathered(batch, row))
    scores = query @ keys.transpose(1, 2) * query.shape[2] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    places = torch.arange(seq_len, device=query.device)
    own = places[seq_len - num_tokens :, None]
    is_seen = places <= own
    if sliding_window is not None:
        is_seen &= places > own - int(sliding_window)
    return (scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)
