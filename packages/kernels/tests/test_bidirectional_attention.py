"""Every token of a row attends to that row, whole, and to nothing else."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kernels.bidirectional_attention import bidirectional_attention
from llmstack_kernels.bidirectional_attention.reference import runs_of_one_length

NUM_HEADS, HEAD_DIM, SCALE = 3, 8, 0.3


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator).to(dtype) for _ in range(3)]


def by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.double())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_rows_of_any_lengths_are_what_the_definition_says(lengths: list[int]) -> None:
    starts = [0, *accumulate(lengths)]
    query, key, value = inputs(starts[-1])
    out = bidirectional_attention(query, key, value, starts, SCALE)
    for start, length in zip(starts, lengths, strict=False):
        row = slice(start, start + length)
        expected = by_definition(query[row], key[row], value[row])
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_some_queries_get_what_they_get_among_all(lengths: list[int], data: st.DataObject) -> None:
    starts = [0, *accumulate(lengths)]
    query, key, value = inputs(starts[-1])
    first = data.draw(st.integers(0, starts[-1] - 1))
    own = slice(first, data.draw(st.integers(first + 1, starts[-1])))
    among_all = bidirectional_attention(query, key, value, starts, SCALE)
    found = bidirectional_attention(query[own], key, value, starts, SCALE, first)
    torch.testing.assert_close(found, among_all[own], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_bit_equal_alone_and_among_others(dtype: torch.dtype) -> None:
    starts = [0, 7, 14, 21, 40]
    query, key, value = inputs(40, dtype)
    together = bidirectional_attention(query, key, value, starts, SCALE)
    for start, end in pairwise(starts):
        row = slice(start, end)
        alone = bidirectional_attention(query[row], key[row], value[row], [0, end - start], SCALE)
        assert torch.equal(together[row], alone)


def test_neighbours_of_one_length_go_together() -> None:
    assert list(runs_of_one_length([0, 4, 8, 10, 14])) == [(0, 2, 4), (8, 1, 2), (10, 1, 4)]


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, key, value = inputs(6)
    with pytest.raises(ValueError, match="one shape"):
        bidirectional_attention(query, key[:5], value, [0, 6], SCALE)
    with pytest.raises(ValueError, match="2 queries from 5 on are not among 6 tokens"):
        bidirectional_attention(query[:2], key, value, [0, 6], SCALE, 5)
    with pytest.raises(ValueError, match="do not fit"):
        bidirectional_attention(query, key, value, [0, 5], SCALE)
