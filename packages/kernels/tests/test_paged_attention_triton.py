"""Attention on a GPU against float64: values, the memory that is read, and bits in any batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.float8_cache import STORED_TYPE, to_stored
from llmstack_kernels.paged_attention import AttentionInputs, reference, triton_decode, triton_prefill
from llmstack_kernels.paged_attention import triton as kernels
from llmstack_kernels.paged_attention.triton_operands import Operands

# Bounds of loops that are not constants: Triton's interpreter reads them out of arrays.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

# Bits are compared in one type in the interpreter, where sums have a fixed order (see `llmstack_kernels.testing`).
EACH_BIT = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Rows = list[tuple[int, int]]  # (tokens computed in this step, context length)


@pytest.fixture(autouse=True)
def few_programs(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter programs take turns, so the fewer there are the less often they look for their splits."""
    if triton_device == "cpu":
        monkeypatch.setattr(triton_decode, "_MAX_PROGRAMS", 2)


@dataclass
class Case:
    """A call of `paged_attention`; whatever no row may read is NaN."""

    rows: Rows
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def starts(self) -> list[int]:
        return [0, *accumulate(num_tokens for num_tokens, _ in self.rows)]

    def run(self, max_query_len: int | None = None) -> torch.Tensor:
        """The kernels' result; without lists of lengths if `max_query_len` is given."""
        starts, seq_lens = self.starts, [seq_len for _, seq_len in self.rows]
        has_lists = max_query_len is None
        return kernels.paged_attention(
            AttentionInputs(
                self.query,
                self.key_cache,
                self.value_cache,
                torch.tensor(starts, dtype=torch.int32, device=self.query.device),
                torch.tensor(seq_lens, dtype=torch.int32, device=self.query.device),
                self.block_tables,
                self.query.shape[2] ** -0.5,
                query_start_loc_list=starts if has_lists else None,
                seq_lens_list=seq_lens if has_lists else None,
                max_query_len=max_query_len,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                alibi_slopes=self.alibi_slopes,
                sinks=self.sinks,
                key_scale=self.key_scale,
                value_scale=self.value_scale,
            )
        )

    def exact(self) -> torch.Tensor:
        """The same in float64, a row at a time."""
        out = torch.empty(self.query.shape, dtype=torch.float64, device=self.query.device)
        for row, (start, end) in enumerate(pairwise(self.starts)):
            out[start:end] = self._attend(row, self.query[start:end].double().transpose(0, 1))
        return out

    def _attend(self, row: int, query: torch.Tensor) -> torch.Tensor:
        num_tokens, seq_len = self.rows[row]
        keys = self._context(self.key_cache, self.key_scale, row, query.shape[0])
        values = self._context(self.value_cache, self.value_scale, row, query.shape[0])
        scores = query @ keys.mT * query.shape[2] ** -0.5
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        positions = torch.arange(seq_len, device=query.device)
        distances = positions - positions[seq_len - num_tokens :, None]
        if self.alibi_slopes is not None:
            scores = scores + self.alibi_slopes[:, None, None].double() * distances
        hidden = (distances > 0) | (distances <= -(self.sliding_window or seq_len + 1))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks[:, None, None].double().expand(-1, num_tokens, 1)), -1)
        return (scores.softmax(-1)[..., :seq_len] @ values).transpose(0, 1)

    def _context(self, cache: torch.Tensor, scale: torch.Tensor | None, row: int, num_heads: int) -> torch.Tensor:
        _, num_kv_heads, block_size, head_dim = cache.shape
        seq_len = self.rows[row][1]
        block_ids = self.block_tables[row, : -(-seq_len // block_size)].long()
        context = cache.double()[block_ids].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len]
        context = context if scale is None else context * scale.double()[:, None, None]
        return context.nan_to_num().repeat_interleave(num_heads // num_kv_heads, 0)  # NaN: before any window

    def only(self, row: int) -> Case:
        """The row alone, with a table as wide as it needs."""
        start, end = self.starts[row : row + 2]
        num_blocks = -(-self.rows[row][1] // self.key_cache.shape[2])
        tables = self.block_tables[row : row + 1, :num_blocks].contiguous()
        return replace(self, rows=[self.rows[row]], query=self.query[start:end], block_tables=tables)


def make_case(
    rows: Rows,
    device: str,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    seed: int = 0,
) -> Case:
    """Queries are slices of a projection; blocks are in random order, and slots that no row sees hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    counts = [-(-seq_len // block_size) for _, seq_len in rows]
    block_ids = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32)
    tables = block_ids[-1].repeat(len(rows), max(counts) + 2)  # beyond a row's blocks: a block of no request
    caches = torch.full((len(block_ids), 2, num_kv_heads, block_size, head_dim), torch.nan)
    for row, (end, (num_tokens, seq_len)) in enumerate(zip(accumulate(counts), rows, strict=True)):
        tables[row, : counts[row]] = block_ids[end - counts[row] : end]
        low = 0 if sliding_window is None else max(0, seq_len - num_tokens + 1 - sliding_window)
        positions = torch.arange(low, seq_len)
        blocks = tables[row].long()[positions // block_size]
        context = torch.randn(len(positions), 2, num_kv_heads, head_dim, generator=generator)
        caches[blocks, :, :, positions % block_size] = context
    num_tokens = sum(num_tokens for num_tokens, _ in rows)
    projection = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    query = projection.to(dtype).to(device)[:, :num_heads]
    key_cache, value_cache = caches.to(dtype).to(device).unbind(1)
    return Case(rows, query, key_cache, value_cache, tables.to(device), sliding_window)


def assert_agrees(case: Case) -> None:
    tolerance = TOLERANCES[case.query.dtype]
    out = case.run()
    assert out.dtype == case.query.dtype
    torch.testing.assert_close(out.double(), case.exact(), atol=tolerance, rtol=tolerance)


def slopes(num_heads: int, device: str) -> torch.Tensor:
    return torch.tensor([0.5**head for head in range(num_heads)], device=device)


@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 80), ((5, 1), 128)], ids=str)
def test_decodes_agree_with_float64(
    heads: tuple[int, int], head_dim: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    rows = [(1, 1), (1, 300), (1, 17)]
    assert_agrees(make_case(rows, triton_device, heads=heads, head_dim=head_dim, dtype=triton_dtype))


@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 16), ((3, 1), 40)], ids=str)
def test_prompts_chunks_and_decodes_in_one_batch_agree_with_float64(
    heads: tuple[int, int], head_dim: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    rows = [(3, 3), (1, 40), (70, 70), (20, 150)]
    assert_agrees(make_case(rows, triton_device, heads=heads, head_dim=head_dim, dtype=triton_dtype))


@pytest.mark.parametrize("window", [1, 7, 100])
def test_nothing_before_the_window_is_read(window: int, triton_dtype: torch.dtype, triton_device: str) -> None:
    rows = [(1, 300), (40, 200), (5, 5)]
    assert_agrees(make_case(rows, triton_device, heads=(2, 1), head_dim=16, dtype=triton_dtype, sliding_window=window))


@pytest.mark.parametrize("with_soft_cap", [True, False], ids=["capped", "uncapped"])
@pytest.mark.parametrize("window", [None, 9])
def test_scores_are_capped_and_slope_with_the_distance(
    with_soft_cap: bool, window: int | None, triton_dtype: torch.dtype, triton_device: str
) -> None:
    case = make_case([(1, 140), (20, 90)], triton_device, head_dim=16, dtype=triton_dtype, sliding_window=window)
    assert_agrees(replace(case, soft_cap=0.7 if with_soft_cap else None, alibi_slopes=slopes(4, triton_device)))


@pytest.mark.parametrize("soft_cap", [None, pytest.param(0.7, marks=pytest.mark.full)])
def test_sinks_take_their_share_of_decodes_and_prompts(
    soft_cap: float | None, triton_dtype: torch.dtype, triton_device: str
) -> None:
    case = make_case([(1, 140), (20, 90)], triton_device, head_dim=16, dtype=triton_dtype, sliding_window=40)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 20.0], device=triton_device)
    assert_agrees(replace(case, sinks=sinks, soft_cap=soft_cap))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # to infinity, as it is meant to be
def test_caps_bound_scores_that_are_very_large(triton_device: str) -> None:
    case = make_case([(1, 50), (3, 40)], triton_device, heads=(2, 2), head_dim=64)
    assert_agrees(replace(case, query=case.query * 1e4, soft_cap=2.0))


@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_blocks_may_have_any_power_of_two_slots(block_size: int, triton_device: str) -> None:
    rows = [(1, 150), (1, 2), (12, 30)]
    assert_agrees(make_case(rows, triton_device, heads=(2, 1), head_dim=16, block_size=block_size))


def test_keys_and_values_of_8_bits_are_multiplied_by_the_scales_of_their_heads(
    triton_dtype: torch.dtype, triton_device: str
) -> None:
    case = make_case([(1, 140), (1, 3), (20, 40)], triton_device, dtype=triton_dtype)
    scales = [torch.tensor(values, device=triton_device) for values in ([0.02, 0.05], [0.5, 0.01])]
    key_cache, value_cache = (
        to_stored(cache, scale[:, None, None])
        for cache, scale in zip((case.key_cache, case.value_cache), scales, strict=True)
    )
    assert key_cache.dtype == STORED_TYPE
    assert key_cache.float().isnan().any()
    assert_agrees(
        replace(case, key_cache=key_cache, value_cache=value_cache, key_scale=scales[0], value_scale=scales[1])
    )


def test_long_contexts_have_longer_splits(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(1, 800), (1, 100), (1, 257)], triton_device, heads=(2, 1), head_dim=16)
    monkeypatch.setattr(triton_decode, "choose_splits", lambda _: triton_decode.Splits(128, 4))
    assert_agrees(case)


def test_splits_are_found_among_more_rows_than_are_looked_at_at_once(triton_device: str) -> None:
    rows = [(0, 5)] * 127 + [(1, 20), (1, 150), (0, 7), (1, 3)]
    assert_agrees(make_case(rows, triton_device, heads=(1, 1), head_dim=16))


def test_rows_without_tokens_are_passed_over(triton_device: str) -> None:
    case = make_case([(0, 5), (1, 30), (0, 1), (4, 20), (0, 9)], triton_device, heads=(2, 1), head_dim=16)
    assert_agrees(case)


MIXED: Rows = [(1, 150), (3, 3), (20, 90), (1, 20)]


@EACH_BIT
@pytest.mark.parametrize("is_plain", [True, False], ids=["plain", "capped with alibi in a window"])
def test_a_row_has_the_same_bits_alone_and_among_others(is_plain: bool, dtype: torch.dtype, triton_device: str) -> None:
    window = None if is_plain else 40
    case = make_case(MIXED, triton_device, head_dim=16, dtype=dtype, sliding_window=window)
    if not is_plain:
        case = replace(case, soft_cap=3.0, alibi_slopes=slopes(4, triton_device))
    assert rows_that_differ_alone(case) == []


def rows_that_differ_alone(case: Case) -> Rows:
    whole = case.run()
    spans = enumerate(pairwise(case.starts))
    return [case.rows[row] for row, (start, end) in spans if not torch.equal(case.only(row).run(), whole[start:end])]


def test_splits_that_depend_on_the_number_of_rows_are_found(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose_by_batch(operands: Operands) -> triton_decode.Splits:
        return triton_decode.Splits(16 if operands.num_rows == 1 else 128, 16)

    monkeypatch.setattr(triton_decode, "choose_splits", choose_by_batch)
    found = rows_that_differ_alone(make_case(MIXED, triton_device, head_dim=16))
    assert (1, 150) in found
    assert all(num_tokens == 1 for num_tokens, _ in found)  # prompts have no splits


def test_tiles_of_keys_that_depend_on_the_batch_are_found(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_tiles = triton_prefill.choose_tiles

    def choose_by_batch(operands: Operands) -> triton_prefill.Tiles:
        return replace(choose_tiles(operands), num_keys=16 if operands.num_rows == 1 else 32)

    monkeypatch.setattr(triton_prefill, "choose_tiles", choose_by_batch)
    assert (20, 90) in rows_that_differ_alone(make_case(MIXED, triton_device, head_dim=16))


@EACH_BIT
def test_a_row_has_the_same_bits_in_other_places_and_blocks(dtype: torch.dtype, triton_device: str) -> None:
    case = make_case(MIXED, triton_device, head_dim=16, dtype=dtype)
    whole = case.run()
    starts = case.starts
    order = [3, 1, 2, 0]
    shift = torch.roll(torch.arange(case.key_cache.shape[0], device=triton_device), 2)
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in order]).to(triton_device)
    moved = replace(
        case,
        rows=[MIXED[row] for row in order],
        query=case.query[tokens],
        key_cache=case.key_cache[shift].contiguous(),
        value_cache=case.value_cache[shift].contiguous(),
        block_tables=((case.block_tables + 2) % len(shift))[order],
    )
    assert torch.equal(moved.run(), whole[tokens])


@EACH_BIT
@pytest.mark.parametrize(("window", "ends"), [(None, [2, 9, 73, 100]), (30, [64, 98, 100])], ids=["whole", "window"])
def test_a_prompt_has_the_same_bits_however_it_is_cut_into_chunks(
    window: int | None, ends: list[int], dtype: torch.dtype, triton_device: str
) -> None:
    whole = make_case([(100, 100)], triton_device, heads=(3, 1), head_dim=16, dtype=dtype)
    whole = replace(whole, sliding_window=window)
    assert chunks_that_differ(whole, ends) == []


def chunks_that_differ(whole: Case, ends: list[int]) -> Rows:
    """Chunks of a prompt, as tokens and context, that have other bits than the same tokens of the whole prompt."""
    expected = whole.run()
    chunks = [
        (start, replace(whole, rows=[(end - start, end)], query=whole.query[start:end]))
        for start, end in pairwise([0, *ends])
    ]
    return [
        chunk.rows[0] for start, chunk in chunks if not torch.equal(chunk.run(), expected[start : chunk.rows[0][1]])
    ]


def test_tiles_of_keys_that_depend_on_the_length_of_a_chunk_are_found(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_tiles = triton_prefill.choose_tiles

    def choose_by_length(operands: Operands) -> triton_prefill.Tiles:
        return replace(choose_tiles(operands), num_keys=16 if operands.inputs.query.shape[0] < 30 else 32)

    monkeypatch.setattr(triton_prefill, "choose_tiles", choose_by_length)
    whole = make_case([(100, 100)], triton_device, heads=(3, 1), head_dim=16)
    assert chunks_that_differ(whole, [2, 9, 73, 100]) == [(27, 100)]  # the first two are within one tile of 16 keys


@pytest.mark.parametrize("rows", [MIXED, [(1, 200), (1, 3)]], ids=["mixed", "decodes"])
def test_lengths_need_not_be_known_on_the_host(rows: Rows, triton_device: str) -> None:
    case = make_case(rows, triton_device, heads=(2, 1), head_dim=16)
    assert torch.equal(case.run(max(num_tokens for num_tokens, _ in rows)), case.run())


def test_what_the_kernels_cannot_compute_the_reference_does(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[torch.Tensor] = []
    original = reference.paged_attention
    monkeypatch.setattr(
        reference, "paged_attention", lambda *args, **kwargs: calls.append(args[0]) or original(*args, **kwargs)
    )
    assert_agrees(make_case([(1, 20), (3, 9)], triton_device, block_size=12))
    assert_agrees(make_case([(1, 20), (3, 9)], triton_device, head_dim=8))
    assert_agrees(make_case([(1, 20)], triton_device, heads=(65, 1), head_dim=256))
    assert len(calls) == 3


def test_memory_that_is_laid_out_otherwise_is_refused(triton_device: str) -> None:
    case = make_case([(1, 20)], triton_device)
    with pytest.raises(ValueError, match="distances"):
        replace(case, value_cache=case.value_cache.contiguous()).run()
    with pytest.raises(ValueError, match="int32"):
        replace(case, block_tables=case.block_tables.long()).run()
    scattered = case.key_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        replace(case, key_cache=scattered, value_cache=scattered).run()


def test_heads_of_queries_may_lie_apart(triton_device: str) -> None:
    case = make_case([(1, 20), (3, 9)], triton_device, head_dim=16)
    apart = torch.stack([case.query, case.query], 2)[:, :, 0]
    assert apart.stride(1) == 2 * apart.shape[2]
    assert torch.equal(replace(case, query=apart).run(), case.run())
