"""Decodes whose contexts begin with the same blocks are bit-equal to each of them alone."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers.attention_cases import TOLERANCES, VARIANTS, running, slopes

from llmstack_kernels.paged_attention import AttentionInputs, paged_attention

NUM_OWN_BLOCKS = 40


class Batch:
    """Rows of a step with their block tables; several tables may begin with the same blocks."""

    def __init__(self, tables: list[list[int]], seq_lens: list[int], num_tokens: list[int], block_size: int) -> None:
        self.tables, self.seq_lens, self.num_tokens, self.block_size = tables, seq_lens, num_tokens, block_size

    def fill(self, shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
        """Makes queries and caches: `shape` is query heads per KV head, KV heads, and their size."""
        group, num_kv_heads, head_dim = shape
        generator = torch.Generator().manual_seed(seed)
        num_blocks = 1 + max(block for table in self.tables for block in table)
        blocks = (num_blocks, num_kv_heads, self.block_size, head_dim)
        self.caches = [torch.randn(blocks, generator=generator).to(dtype) for _ in range(2)]
        queries = torch.randn(sum(self.num_tokens), group * num_kv_heads, head_dim, generator=generator).to(dtype)
        self.queries = queries.split(self.num_tokens)

    def attend(self, rows: list[int], **options: Any) -> list[torch.Tensor]:
        """Outputs of these rows, computed together."""
        width = max(len(self.tables[row]) for row in rows)
        tables = [self.tables[row] + [0] * (width - len(self.tables[row])) for row in rows]
        starts, ends = [0, *accumulate(self.num_tokens[row] for row in rows)], [self.seq_lens[row] for row in rows]
        inputs = AttentionInputs(
            torch.cat([self.queries[row] for row in rows]),
            *self.caches,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            0.125,
            query_start_loc_list=starts,
            seq_lens_list=ends,
            **options,
        )
        return list(paged_attention(inputs).split([self.num_tokens[row] for row in rows]))


def draw_batch(data: st.DataObject) -> Batch:
    """Rows behind a prefix, a longer one that begins with it, or none; few of them compute several tokens."""
    block_size = data.draw(st.sampled_from([8, 16, 32, 128]), "block size")
    lengths = data.draw(st.lists(st.integers(0, 200 // block_size + 1), min_size=2, max_size=2), "prefix blocks")
    prefixes = [[], list(range(lengths[0])), list(range(sum(lengths)))]
    tables, seq_lens, num_tokens = [], [], []
    for row in range(data.draw(st.integers(2, 12), "rows")):
        prefix = prefixes[data.draw(st.integers(0, 2), "prefix")]
        num_own = data.draw(st.integers(0 if prefix else 1, 100 // block_size + 1), "own blocks")
        first = sum(lengths) + row * NUM_OWN_BLOCKS
        tables.append(prefix + list(range(first, first + num_own)))
        full = len(tables[-1]) * block_size
        seq_lens.append(data.draw(st.integers(max(1, full - block_size), full), "context"))
        num_tokens.append(data.draw(st.sampled_from([1, 1, 1, min(7, seq_lens[-1])]), "tokens"))
    return Batch(tables, seq_lens, num_tokens, block_size)


@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_behind_a_prefix_are_bit_equal_to_each_alone(variant: str, data: st.DataObject) -> None:
    batch, dtype = draw_batch(data), data.draw(st.sampled_from(list(TOLERANCES)), "dtype")
    group, num_kv_heads = data.draw(st.integers(1, 5), "group"), data.draw(st.integers(1, 3), "KV heads")
    batch.fill((group, num_kv_heads, data.draw(st.sampled_from([16, 64, 80]), "head_dim")), dtype, seed=0)
    options = {
        "sliding_window": data.draw(st.sampled_from([None, None, 70]), "window"),
        "alibi_slopes": data.draw(st.sampled_from([None, slopes(num_kv_heads * group)]), "slopes"),
    }
    rows = list(range(len(batch.tables)))
    num_threads = torch.get_num_threads()
    try:
        with running(variant):
            torch.set_num_threads(data.draw(st.sampled_from([1, 2, 3]), "threads"))
            together = batch.attend(rows, **options)
            for row in rows:
                assert torch.equal(together[row], batch.attend([row], **options)[0])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_rows_than_an_item_takes_share_a_prefix(variant: str) -> None:
    prefix = list(range(12))
    tables = [[*prefix, 12 + row] for row in range(130)]
    batch = Batch(tables, [193 + row % 16 for row in range(130)], [1] * 130, 16)
    batch.fill((1, 2, 64), torch.bfloat16, seed=1)
    with running(variant):
        together = batch.attend(list(range(130)))
        assert all(torch.equal(together[row], batch.attend([row])[0]) for row in range(130))
