"""Paged attention is right for any mix of rows, and a row's result does not change with its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kernels import paged_attention as paged_attention_module
from llmstack_kernels.native import NativeLibrary, supported_variants
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


@pytest.fixture(params=["cpu", *VARIANTS])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


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


def caches(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.key_cache, case.value_cache


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


@dataclass
class Context:
    """What one request's tokens ask for, and are found by."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    keys: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    values: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]


def attend_in_steps(
    contexts: list[Context], steps: list[dict[int, int]], block_size: int, **options: object
) -> list[torch.Tensor]:
    """Outputs of each context whose next chunks go together as `steps` say: context to tokens, per step.

    Each context has blocks of its own, in which slots that no token has been written to hold NaN.
    """
    num_tokens, num_kv_heads, head_dim = (max(sizes) for sizes in zip(*(c.keys.shape for c in contexts), strict=True))
    blocks_each = -(-num_tokens // block_size)
    shape = (blocks_each * len(contexts), num_kv_heads, block_size, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=contexts[0].keys.dtype) for _ in range(2)]
    tables = torch.arange(shape[0]).view(blocks_each, -1).T.to(torch.int32)  # neighbours' blocks alternate
    done, outputs = [0] * len(contexts), [torch.empty_like(c.query) for c in contexts]
    for step in steps:
        for i, chunk in step.items():
            new = torch.arange(done[i], done[i] + chunk)
            where = (tables[i, new // block_size].long(), slice(None), new % block_size)
            caches[0][where], caches[1][where] = contexts[i].keys[new], contexts[i].values[new]
        starts, ends = [0, *accumulate(step.values())], [done[i] + chunk for i, chunk in step.items()]
        out = paged_attention(
            AttentionInputs(
                torch.cat([contexts[i].query[done[i] : end] for i, end in zip(step, ends, strict=True)]),
                *caches,
                torch.tensor(starts, dtype=torch.int32),
                torch.tensor(ends, dtype=torch.int32),
                tables[list(step)],
                head_dim**-0.5,
                query_start_loc_list=starts,
                seq_lens_list=ends,
                **options,
            )
        )
        for i, end, (first, last) in zip(step, ends, pairwise(starts), strict=True):
            outputs[i][done[i] : end] = out[first:last]
            done[i] = end
    return outputs


@pytest.mark.parametrize("variant", VARIANTS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_token_is_bit_equal_however_its_row_is_cut_and_batched(variant: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(TOLERANCES)), "dtype")
    num_kv_heads, group = data.draw(st.integers(1, 3), "KV heads"), data.draw(st.integers(1, 8), "group")
    head_dim = data.draw(st.sampled_from([16, 64, 80]), "head_dim")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    lengths = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3), "lengths")
    shapes = [(num_kv_heads * group, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim)]
    contexts = [Context(*(torch.randn(n, *s, generator=generator).to(dtype) for s in shapes)) for n in lengths]
    options = {
        "sliding_window": data.draw(st.none() | st.integers(1, 220), "window"),
        "soft_cap": data.draw(st.sampled_from([None, 1.5]), "soft cap"),
        "alibi_slopes": data.draw(st.sampled_from([None, slopes(num_kv_heads * group)]), "slopes"),
    }
    steps = []
    left = dict(enumerate(lengths))
    while left:
        members = data.draw(st.sets(st.sampled_from(sorted(left)), min_size=1))
        step = {i: data.draw(st.just(1) | st.integers(1, left[i])) for i in sorted(members)}
        steps.append(step)
        left = {i: n - step.get(i, 0) for i, n in left.items() if n > step.get(i, 0)}
    block_size = data.draw(st.sampled_from([1, 5, 8, 16, 32, 128]), "block size")
    with running(variant):
        found = attend_in_steps(contexts, steps, block_size, **options)
        for context, out in zip(contexts, found, strict=True):
            whole = attend_in_steps([context], [{0: len(context.query)}], 16, **options)[0]
            assert not whole.isnan().any()
            assert torch.equal(out, whole)


def test_one_decode_after_another_equals_the_prefill(variant: str) -> None:
    for dtype in TOLERANCES:
        context = Context(*(torch.randn(150, heads, 64).to(dtype) for heads in (6, 2, 2)))
        decoded = attend_in_steps([context], [{0: 1}] * 150, 16)[0]
        assert torch.equal(decoded, attend_in_steps([context], [{0: 150}], 16)[0])


def test_more_threads_change_nothing(variant: str) -> None:
    case = make_case(MIXED_ROWS, head_dim=64, dtype=torch.bfloat16)
    expected, num_threads = case.run(), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(case.run(), expected)
    finally:
        torch.set_num_threads(num_threads)


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
