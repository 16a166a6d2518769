"""Rows of paged attention with caches of their own, and what runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch

from llmstack_kernels import paged_attention as paged_attention_module
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.paged_attention import (
    AttentionInputs,
    cpu,
    native,
    paged_attention,
    plan_paged_attention,
    reference,
)
from llmstack_kernels.testing import native_variants

BLOCK_SIZE = 16


VARIANTS = native_variants()


TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


# (tokens computed in this step, context length)
MIXED_ROWS = [(1, 1), (1, 5), (1, 17), (3, 3), (150, 150), (20, 100), (1, 16), (140, 150), (1, 33), (2, 64), (1, 120)]


@contextmanager
def running(backend: str) -> Iterator[None]:
    """`paged_attention` runs PyTorch, or one variant of the native kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention_module, "implementation", lambda *_: cpu if backend == "cpu" else native)
        if backend != "cpu":
            library = NativeLibrary(backend)
            patch.setattr(native, "require_library", lambda: library)
        yield


@dataclass
class Case:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    rows: list[tuple[int, int]]
    block_tables: torch.Tensor
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(num_tokens for num_tokens, _ in self.rows)]

    @property
    def seq_lens(self) -> list[int]:
        return [seq_len for _, seq_len in self.rows]

    def run(self, *, use_reference: bool = False, with_plan: bool = True) -> torch.Tensor:
        keywords = {
            "query_start_loc_list": self.starts,
            "seq_lens_list": self.seq_lens,
            "sliding_window": self.sliding_window,
        }
        plan = plan_paged_attention(self.key_cache, self.block_tables, **keywords) if with_plan else None
        function = reference.paged_attention if use_reference else paged_attention
        return function(
            AttentionInputs(
                self.query,
                self.key_cache,
                self.value_cache,
                torch.tensor(self.starts, dtype=torch.int32),
                torch.tensor(self.seq_lens, dtype=torch.int32),
                self.block_tables,
                self.query.shape[-1] ** -0.5,
                soft_cap=self.soft_cap,
                alibi_slopes=self.alibi_slopes,
                key_scale=self.scales[0],
                value_scale=self.scales[1],
                plan=plan,
                **keywords,
            )
        )

    def only(self, row: int) -> Case:
        start, end = self.starts[row : row + 2]
        tables = self.block_tables[row : row + 1]
        return replace(self, query=self.query[start:end], rows=[self.rows[row]], block_tables=tables)


def make_case(
    rows: list[tuple[int, int]],
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in rows]
    block_ids = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    block_tables = torch.zeros(len(rows), max(counts) + 1, dtype=torch.int32)
    for row, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        block_tables[row, :count] = block_ids[end - count : end]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return Case(
        normal(sum(num_tokens for num_tokens, _ in rows), num_heads, head_dim),
        normal(len(block_ids), num_kv_heads, BLOCK_SIZE, head_dim),
        normal(len(block_ids), num_kv_heads, BLOCK_SIZE, head_dim),
        rows,
        block_tables,
        sliding_window,
    )


def slopes(num_heads: int) -> torch.Tensor:
    return torch.tensor([0.5**head for head in range(num_heads)])


def caches(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.key_cache, case.value_cache
