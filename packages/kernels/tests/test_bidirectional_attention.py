"""Every token of a row attends to that row, whole, and to nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_kernels import bidirectional_attention as operation
from llmstack_kernels.bidirectional_attention import bidirectional_attention, native, reference
from llmstack_kernels.bidirectional_attention.runs import runs_of_one_length
from llmstack_kernels.native import NativeLibrary
from llmstack_kernels.testing import native_variants

NUM_HEADS = 3
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# Within a vector of any processor, whole vectors, and those of SigLIP and of Qwen's towers.
HEAD_DIMS = [8, 20, 32, 64, 72, 80, 128]


@pytest.fixture(params=["reference", *native_variants()], scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The operation runs in PyTorch, or in one variant of the native kernels."""
    with pytest.MonkeyPatch.context() as patch:
        module = reference if request.param == "reference" else native
        patch.setattr(operation, "implementation", lambda *_: module)
        if module is native:
            library = NativeLibrary(request.param)
            patch.setattr(native, "require_library", lambda: library)
        yield request.param


def inputs(num_tokens: int, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values, which lie among each other as a projection leaves them."""
    generator = torch.Generator().manual_seed(num_tokens)
    projected = torch.randn(num_tokens, 3, NUM_HEADS, head_dim, generator=generator).to(dtype)
    return list(projected.unbind(1))


def by_definition(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.double())


def expect_definition(
    starts: list[int], head_dim: int, dtype: torch.dtype, scale: float, tolerance: float | None = None
) -> None:
    query, key, value = inputs(starts[-1], head_dim, dtype)
    out = bidirectional_attention(query, key, value, starts, scale)
    assert out.dtype == dtype
    for start, end in pairwise(starts):
        expected = by_definition(query[start:end], key[start:end], value[start:end], scale)
        torch.testing.assert_close(out[start:end].double(), expected, rtol=0, atol=tolerance or TOLERANCES[dtype])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 9) | st.integers(60, 140), min_size=1, max_size=4),
    st.sampled_from(HEAD_DIMS),
    st.sampled_from(list(TOLERANCES)),
)
def test_rows_of_any_lengths_are_what_the_definition_says(
    backend: str, lengths: list[int], head_dim: int, dtype: torch.dtype
) -> None:
    expect_definition([0, *accumulate(lengths)], head_dim, dtype, head_dim**-0.5)


def test_a_row_of_many_tiles_and_large_scores_is_what_the_definition_says(backend: str) -> None:
    expect_definition([0, 500], 64, torch.float32, 1.5, tolerance=5e-5)  # scores of up to 50, to 24 bits


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale_is_what_the_definition_says(backend: str, scale: float) -> None:
    expect_definition([0, 7, 12], 16, torch.float32, scale)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.data())
def test_some_queries_get_what_they_get_among_all(backend: str, lengths: list[int], data: st.DataObject) -> None:
    starts = [0, *accumulate(lengths)]
    query, key, value = inputs(starts[-1])
    first = data.draw(st.integers(0, starts[-1] - 1))
    own = slice(first, data.draw(st.integers(first + 1, starts[-1])))
    among_all = bidirectional_attention(query, key, value, starts, 0.3)
    found = bidirectional_attention(query[own], key, value, starts, 0.3, first)
    if backend == "reference":
        torch.testing.assert_close(found, among_all[own], rtol=0, atol=1e-6)
    else:
        assert torch.equal(found, among_all[own])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_row_is_bit_equal_alone_and_among_others(backend: str, dtype: torch.dtype) -> None:
    starts = [0, 7, 14, 21, 40, 170]
    query, key, value = inputs(170, 24, dtype)
    together = bidirectional_attention(query, key, value, starts, 0.3)
    for start, end in pairwise(starts):
        row = slice(start, end)
        alone = bidirectional_attention(query[row], key[row], value[row], [0, end - start], 0.3)
        assert torch.equal(together[row], alone)


@pytest.mark.parametrize("variant", native_variants())
def test_more_threads_change_nothing(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = NativeLibrary(variant)
    monkeypatch.setattr(native, "require_library", lambda: library)
    query, key, value = inputs(900, 64)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append(native.bidirectional_attention(query, key, value, [0, 700, 900], 0.125))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_row_that_is_no_number_does_not_spread(backend: str) -> None:
    query, key, value = inputs(90, 24)
    for tensor in (query, key, value):
        tensor[30:70] = torch.nan
    out = bidirectional_attention(query, key, value, [0, 30, 70, 90], 0.3)
    assert out[30:70].isnan().all()
    assert not out[:30].isnan().any()
    assert not out[70:].isnan().any()


def test_neighbours_of_one_length_go_together() -> None:
    assert list(runs_of_one_length([0, 4, 8, 10, 14])) == [(0, 2, 4), (8, 1, 2), (10, 1, 4)]


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, key, value = inputs(6)
    with pytest.raises(ValueError, match="one shape"):
        bidirectional_attention(query, key[:5], value, [0, 6], 0.3)
    with pytest.raises(ValueError, match="2 queries from 5 on are not among 6 tokens"):
        bidirectional_attention(query[:2], key, value, [0, 6], 0.3, 5)
    with pytest.raises(ValueError, match="do not fit"):
        bidirectional_attention(query, key, value, [0, 5], 0.3)
    with pytest.raises(ValueError, match="do not fit"):
        bidirectional_attention(query, key, value, [0, 8, 6], 0.3)
    with pytest.raises(ValueError, match="do not fit"):
        bidirectional_attention(query, key, value, [1, 6], 0.3)
