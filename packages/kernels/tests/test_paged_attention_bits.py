"""The bits of a token do not change with chunks, neighbours or threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers.attention_cases import (
    MIXED_ROWS,
    TOLERANCES,
    VARIANTS,
    make_case,
    running,
    slopes,
)

from llmstack_kernels.paged_attention import (
    AttentionInputs,
    paged_attention,
)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


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
    num_kv_heads, group = data.draw(st.integers(1, 3), "KV heads"), data.draw(st.integers(1, 9), "group")
    head_dim = data.draw(st.sampled_from([16, 64, 80, 112]), "head_dim")
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


def exact(context: Context) -> torch.Tensor:
    """Attention of the last token to the whole context, in float64."""
    group = context.query.shape[1] // context.keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (context.keys, context.values))
    scores = torch.einsum("hd,khd->hk", context.query[-1].double(), keys) * keys.shape[2] ** -0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("head_dim", [80, 112])  # vectors that are left over make one pair, or two
def test_few_queries_equal_the_prompt_for_any_number_of_heads_per_kv_head(head_dim: int, variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in TOLERANCES.items():
        for group in range(1, 10):  # up to 8 queries of a KV head read values as they lie, and up to 4 keys, too
            shapes = [(group, head_dim), (1, head_dim), (1, head_dim)]
            context = Context(*(torch.randn(81, *shape, generator=generator).to(dtype) for shape in shapes))
            whole = attend_in_steps([context], [{0: 81}], 16)[0]
            found = attend_in_steps([context], [{0: 66}, {0: 1}, {0: 8}, {0: 5}, {0: 1}], 16)[0]
            assert torch.equal(found, whole)
            torch.testing.assert_close(found[-1].double(), exact(context), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("block_size", [16, 64])
def test_decodes_equal_the_prompt_whatever_part_of_a_tile_they_see(
    block_size: int, window: int | None, variant: str
) -> None:
    # One or two query heads of a KV head add up values of bfloat16 by even and odd dimensions with AVX2.
    generator = torch.Generator().manual_seed(0)
    steps = [{0: 63}, {0: 1}, {0: 1}, {0: 63}, {0: 1}, {0: 14}, {0: 1}]  # also the last of a block and the first of one
    for dtype in TOLERANCES:
        for num_heads, num_kv_heads, head_dim in ((3, 3, 64), (4, 2, 80), (2, 2, 128), (3, 1, 64)):
            shapes = [(num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, head_dim)]
            context = Context(*(torch.randn(144, *shape, generator=generator).to(dtype) for shape in shapes))
            whole = attend_in_steps([context], [{0: 144}], 16, sliding_window=window)[0]
            assert torch.equal(attend_in_steps([context], steps, block_size, sliding_window=window)[0], whole)


def test_more_threads_change_nothing(variant: str) -> None:
    case = make_case(MIXED_ROWS, head_dim=64, dtype=torch.bfloat16)
    expected, num_threads = case.run(), torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(case.run(), expected)
    finally:
        torch.set_num_threads(num_threads)
