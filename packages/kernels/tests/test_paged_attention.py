"""Paged attention is right for any mix of rows, and a row's result does not change with its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers.attention_cases import (
    BLOCK_SIZE,
    MIXED_ROWS,
    TOLERANCES,
    VARIANTS,
    Case,
    caches,
    make_case,
    running,
    slopes,
)

from llmstack_kernels.native import supported_variants
from llmstack_kernels.paged_attention import (
    AttentionInputs,
    cpu,
    paged_attention,
    reference,
)


@pytest.fixture(params=["cpu", *VARIANTS])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


HEADS_AND_WINDOWS = [((12, 12), None), ((8, 2), 7), ((5, 1), 1), ((8, 2), 40)]
MORE_HEADS_AND_WINDOWS = sorted(
    set(product([(12, 12), (8, 2), (5, 1)], [None, 1, 7, 40])) - set(HEADS_AND_WINDOWS), key=str
)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("heads", "sliding_window"),
    [*HEADS_AND_WINDOWS, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_HEADS_AND_WINDOWS)],
    ids=str,
)
def test_mixed_batches_equal_the_reference(
    dtype: torch.dtype, heads: tuple[int, int], sliding_window: int | None, backend: str
) -> None:
    case = make_case(MIXED_ROWS, num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, sliding_window=sliding_window)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(case.run(), case.run(use_reference=True), atol=tolerance, rtol=tolerance)


def test_blocks_may_lie_any_distance_apart(backend: str) -> None:
    """As where layers with other tensors share the bytes of a block."""
    case = make_case(MIXED_ROWS, num_heads=4, num_kv_heads=2, dtype=torch.float32, sliding_window=7)
    expected = case.run()
    num_blocks, *shape = case.key_cache.shape
    apart = torch.full((2, num_blocks, case.key_cache[0].numel() + 4), torch.nan)
    for place, name in enumerate(("key_cache", "value_cache")):
        cache = apart[place, :, :-4].unflatten(1, shape)
        cache.copy_(getattr(case, name))
        case = replace(case, **{name: cache})
    torch.testing.assert_close(case.run(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "sliding_window"),
    [
        (4, 4, None),
        (6, 2, 7),
        pytest.param(4, 4, 7, marks=pytest.mark.full),
        pytest.param(6, 2, None, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("with_soft_cap", [True, False], ids=["capped", "uncapped"])
@pytest.mark.parametrize("with_alibi", [True, False], ids=["alibi", "no alibi"])
def test_soft_caps_and_alibi_equal_the_reference(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    sliding_window: int | None,
    with_soft_cap: bool,
    with_alibi: bool,
    backend: str,
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
    head_dim=st.sampled_from([8, 16, 48]),
    backend=st.sampled_from(["cpu", *supported_variants()]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_any_mix_of_rows_equals_the_reference(
    rows: list[tuple[int, int]],
    sliding_window: int | None,
    heads: tuple[int, int],
    head_dim: int,
    backend: str,
    seed: int,
) -> None:
    case = make_case(
        rows, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, sliding_window=sliding_window, seed=seed
    )
    with running(backend):
        torch.testing.assert_close(case.run(), case.run(use_reference=True), atol=5e-6, rtol=5e-6)


def test_the_reference_equals_dense_attention() -> None:
    case = make_case([(40, 40)], num_heads=4, num_kv_heads=2)
    keys, values = dense_context(case)
    dense = torch.nn.functional.scaled_dot_product_attention(
        case.query.transpose(0, 1)[None], keys[None], values[None], is_causal=True
    )
    torch.testing.assert_close(case.run(use_reference=True), dense[0].transpose(0, 1), atol=5e-6, rtol=5e-6)


def test_a_plan_made_beforehand_changes_nothing(backend: str) -> None:
    case = make_case(MIXED_ROWS)
    assert torch.equal(case.run(with_plan=True), case.run(with_plan=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("backend", "num_heads", "num_kv_heads"),
    [
        *(pytest.param("cpu", *heads, marks=pytest.mark.full) for heads in [(12, 12), (32, 4)]),  # seconds each
        ("cpu", 8, 2),
        *(pytest.param(*variant.values, 8, 2, marks=variant.marks) for variant in VARIANTS),
        *(  # heads of all numbers are in every run by the property below
            pytest.param(*variant.values, *heads, marks=[*variant.marks, pytest.mark.full])
            for variant in VARIANTS
            for heads in [(12, 12), (32, 4)]
        ),
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "capped with alibi"])
def test_rows_are_bit_equal_alone_and_among_neighbours(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, sliding_window: int | None, is_plain: bool, backend: str
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


def test_blocks_of_others_are_never_read(backend: str) -> None:
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


def test_keys_and_values_of_8_bits_are_multiplied_by_the_scales_of_their_heads(backend: str) -> None:
    case = make_case(MIXED_ROWS)
    scales = torch.tensor([0.02, 0.05]), torch.tensor([0.5, 0.01])
    stored = [
        cache.div(s[:, None, None]).to(torch.float8_e4m3fn) for cache, s in zip(caches(case), scales, strict=True)
    ]
    widened = [x.float() * s[:, None, None] for x, s in zip(stored, scales, strict=True)]
    expected = replace(case, key_cache=widened[0], value_cache=widened[1]).run(use_reference=True)
    narrow = replace(case, key_cache=stored[0], value_cache=stored[1], scales=scales)
    torch.testing.assert_close(narrow.run(), expected, atol=5e-6, rtol=5e-6)
    with pytest.raises(ValueError, match="key_scale"):
        replace(narrow, scales=(None, None)).run()


def test_without_lists_the_longest_row_must_be_named() -> None:
    case = make_case([(1, 5), (1, 20)])
    starts, seq_lens = (torch.tensor(x, dtype=torch.int32) for x in (case.starts, case.seq_lens))
    arguments = (case.query, *caches(case), starts, seq_lens, case.block_tables, 0.2)
    with pytest.raises(ValueError, match="max_query_len"):
        paged_attention(AttentionInputs(*arguments))
    with pytest.raises(ValueError, match="seq_lens_list"):
        cpu.paged_attention(AttentionInputs(*arguments, max_query_len=1))
    with_lists = reference.paged_attention(
        AttentionInputs(*arguments, query_start_loc_list=case.starts, seq_lens_list=case.seq_lens)
    )
    assert torch.equal(reference.paged_attention(AttentionInputs(*arguments, max_query_len=1)), with_lists)


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


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_what_lies_outside_the_window_and_beyond_the_context_does_not_matter(dtype: torch.dtype, variant: str) -> None:
    case = replace(make_case([(1, 90), (3, 150)], dtype=dtype), sliding_window=20)
    expected = case.run()
    for row, (first_seen, seq_len) in enumerate([(70, 90), (128, 150)]):
        for position in [*range(first_seen), *range(seq_len, -(-seq_len // BLOCK_SIZE) * BLOCK_SIZE)]:
            block = int(case.block_tables[row, position // BLOCK_SIZE])
            for cache in (case.key_cache, case.value_cache):
                cache[block, :, position % BLOCK_SIZE] = torch.nan
    assert torch.equal(case.run(), expected)


def test_a_nan_in_the_context_reaches_those_who_see_it(variant: str) -> None:
    case = make_case([(40, 40)], num_heads=2, num_kv_heads=2)
    case.key_cache[int(case.block_tables[0, 1]), :, 4] = torch.nan  # position 20
    out = case.run()
    assert out[20:].isnan().all()
    assert not out[:20].isnan().any()


def test_queries_may_be_slices_of_a_projection(backend: str) -> None:
    case = make_case(MIXED_ROWS, num_heads=4, num_kv_heads=2)
    projected = torch.randn(len(case.query), 8, 32)
    projected[:, :4] = case.query
    strided = replace(case, query=projected[:, :4])
    assert not strided.query.is_contiguous()
    assert torch.equal(strided.run(), case.run())


def test_blocks_may_lie_apart(backend: str) -> None:
    case = make_case(MIXED_ROWS, num_heads=8, num_kv_heads=2)
    layers = torch.stack([case.value_cache, case.key_cache, case.value_cache], dim=1)
    apart = replace(case, key_cache=layers[:, 1], value_cache=layers[:, 2])
    assert torch.equal(apart.run(), case.run())


@pytest.mark.parametrize("head_dim", [8, 24, 40])
def test_other_head_sizes_are_left_to_pytorch(head_dim: int, variant: str) -> None:
    case = make_case([(1, 17), (3, 3), (20, 40)], head_dim=head_dim)
    found = case.run()
    with running("cpu"):
        assert torch.equal(found, case.run())


def test_tables_of_another_type_are_refused(variant: str) -> None:
    case = make_case([(2, 2)])
    with pytest.raises(ValueError, match="int32"):
        replace(case, block_tables=case.block_tables.long()).run()
    with pytest.raises(ValueError, match="contiguous"):
        replace(case, query=case.query.transpose(1, 2).contiguous().transpose(1, 2)).run()


@pytest.mark.parametrize(
    ("query_dim", "value_blocks", "seq_len", "named"),
    [(16, 2, 40, "no room for a context of 40"), (16, 1, 1, "does not fit caches"), (32, 2, 1, "does not fit caches")],
)
def test_shapes_and_contexts_beyond_the_cache_are_refused(query_dim: int, value_blocks: int, seq_len: int, named: str):
    keys, values = torch.zeros(2, 2, 4, 16), torch.zeros(value_blocks, 2, 4, 16)
    starts, seq_lens, tables = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [seq_len], [[0]]))
    with pytest.raises(ValueError, match=named):
        paged_attention(
            AttentionInputs(
                torch.zeros(1, 4, query_dim),
                keys,
                values,
                starts,
                seq_lens,
                tables,
                0.25,
                query_start_loc_list=[0, 1],
                seq_lens_list=[seq_len],
            )
        )
