"""Paged attention is right for any mix of rows, and a row's result does not change with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kernels.paged_attention import cpu, paged_attention, plan_paged_attention, reference

BLOCK_SIZE = 16
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# (tokens computed in this step, context length)
MIXED_ROWS = [(1, 1), (1, 5), (1, 17), (3, 3), (150, 150), (20, 100), (1, 16), (140, 150), (1, 33), (2, 64), (1, 120)]


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
            self.query,
            self.key_cache,
            self.value_cache,
            torch.tensor(self.starts, dtype=torch.int32),
            torch.tensor(self.seq_lens, dtype=torch.int32),
            self.block_tables,
            self.query.shape[-1] ** -0.5,
            soft_cap=self.soft_cap,
            alibi_slopes=self.alibi_slopes,
            plan=plan,
            **keywords,
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


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(12, 12), (8, 2), (5, 1)])
@pytest.mark.parametrize("sliding_window", [None, 1, 7, 40])
def test_mixed_batches_equal_the_reference(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, sliding_window: int | None
) -> None:
    case = make_case(
        MIXED_ROWS, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, sliding_window=sliding_window
    )
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(case.run(), case.run(use_reference=True), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("sliding_window", [None, 7])
@pytest.mark.parametrize("with_soft_cap", [True, False], ids=["capped", "uncapped"])
@pytest.mark.parametrize("with_alibi", [True, False], ids=["alibi", "no alibi"])
def test_soft_caps_and_alibi_equal_the_reference(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    sliding_window: int | None,
    with_soft_cap: bool,
    with_alibi: bool,
) -> None:
    plain = make_case(MIXED_ROWS, num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype)
    case = replace(
        plain,
        sliding_window=sliding_window,
        soft_cap=0.7 if with_soft_cap else None,
        alibi_slopes=slopes(num_heads) if with_alibi else None,
    )
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(case.run(), case.run(use_reference=True), atol=tolerance, rtol=tolerance)


def slopes(num_heads: int) -> torch.Tensor:
    return torch.tensor([0.5**head for head in range(num_heads)])


def test_the_reference_caps_scores_before_it_adds_the_slope_times_the_distance() -> None:
    case = replace(make_case([(3, 40)], num_heads=4, num_kv_heads=2), soft_cap=0.7, alibi_slopes=slopes(4))
    keys, values = dense_context(case)
    scores = case.query.transpose(0, 1) @ keys.transpose(1, 2) * 32**-0.5
    distances = torch.arange(40) - torch.arange(37, 40)[:, None]
    scores = 0.7 * torch.tanh(scores / 0.7) + slopes(4).view(4, 1, 1) * distances
    weights = scores.masked_fill(distances > 0, float("-inf")).softmax(-1)
    expected = (weights @ values).transpose(0, 1)
    torch.testing.assert_close(case.run(use_reference=True), expected, atol=5e-6, rtol=5e-6)


def dense_context(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first row, of 40 tokens, for each of 4 query heads: [4, 40, 32] each."""
    keys, values = (
        cache[case.block_tables[0, :3].long()].transpose(0, 1).reshape(2, 48, 32)[:, :40].repeat_interleave(2, 0)
        for cache in (case.key_cache, case.value_cache)
    )
    return keys, values


@given(
    rows=st.lists(
        st.integers(1, 70).flatmap(lambda seq_len: st.tuples(st.integers(1, seq_len), st.just(seq_len))),
        min_size=1,
        max_size=7,
    ),
    sliding_window=st.none() | st.integers(1, 80),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_mix_of_rows_equals_the_reference(
    rows: list[tuple[int, int]], sliding_window: int | None, heads: tuple[int, int], seed: int
) -> None:
    case = make_case(
        rows, num_heads=heads[0], num_kv_heads=heads[1], head_dim=8, sliding_window=sliding_window, seed=seed
    )
    torch.testing.assert_close(case.run(), case.run(use_reference=True), atol=5e-6, rtol=5e-6)


def test_the_reference_equals_dense_attention() -> None:
    case = make_case([(40, 40)], num_heads=4, num_kv_heads=2)
    keys, values = dense_context(case)
    dense = torch.nn.functional.scaled_dot_product_attention(
        case.query.transpose(0, 1)[None], keys[None], values[None], is_causal=True
    )
    torch.testing.assert_close(case.run(use_reference=True), dense[0].transpose(0, 1), atol=5e-6, rtol=5e-6)


def test_a_plan_made_beforehand_changes_nothing() -> None:
    case = make_case(MIXED_ROWS)
    assert torch.equal(case.run(with_plan=True), case.run(with_plan=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(12, 12), (8, 2), (32, 4)])
@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "capped with alibi"])
def test_rows_are_bit_equal_alone_and_among_neighbours(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, sliding_window: int | None, is_plain: bool
) -> None:
    rows = MIXED_ROWS + [(1, seq_len) for seq_len in (3, 90, 110, 128, 200, 240, 250, 256, 300, 400)]
    case = make_case(
        rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        dtype=dtype,
        sliding_window=sliding_window,
    )
    if not is_plain:
        case = replace(case, soft_cap=2.0, alibi_slopes=slopes(num_heads))
    whole = case.run()
    for row in range(len(rows)):
        start, end = case.starts[row : row + 2]
        assert torch.equal(case.only(row).run(), whole[start:end]), rows[row]


def test_blocks_of_others_are_never_read() -> None:
    case = make_case([(1, 5), (1, 90), (4, 20)])
    expected = case.run()
    own = {
        int(block) for row, (_, n) in enumerate(case.rows) for block in case.block_tables[row, : -(-n // BLOCK_SIZE)]
    }
    for block in set(range(case.key_cache.shape[0])) - own:
        case.key_cache[block] = torch.nan
        case.value_cache[block] = torch.nan
    assert torch.equal(case.run(), expected)


def test_long_batches_are_cut_into_groups_that_fit_the_cache() -> None:
    case = make_case([(1, 1000)] * 9 + [(1, 20)] * 3, num_heads=2, num_kv_heads=2, head_dim=64)
    plan = cpu.make_plan(case.key_cache, case.block_tables, case.starts, case.seq_lens, None)
    assert [len(group.tokens) for group in plan.decode_groups] == [8, 1, 3]
    torch.testing.assert_close(case.run(), case.run(use_reference=True), atol=5e-6, rtol=5e-6)


def test_heads_that_cannot_share_and_wrong_rows_are_refused() -> None:
    case = make_case([(2, 2)], num_heads=3, num_kv_heads=2)
    with pytest.raises(ValueError, match="share"):
        case.run()
    case = make_case([(2, 2)])
    case.query = case.query[:1]
    with pytest.raises(ValueError, match="query_start_loc"):
        case.run()
    with pytest.raises(ValueError, match="alibi_slopes"):
        replace(make_case([(2, 2)]), alibi_slopes=slopes(3)).run()
