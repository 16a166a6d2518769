"""Top-k and top-p sets against a reference that sorts in Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner.sampling.top_k_top_p import _top_k_by_keys, exact_top_k, num_kept, top_k_top_p_mask

# Few different values, so that ties are everywhere; powers of two, so that sums are exact.
TIED_ROWS = st.integers(1, 20).flatmap(
    lambda width: st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=width, max_size=width), min_size=1, max_size=5
    )
)
TIED_ROW = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=40)


def reference_order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token_id: (-row[token_id], token_id))


def reference_set(row: list[float], top_k: int, top_p: float) -> set[int]:
    """The smallest prefix, by falling weight and rising id, whose mass reaches top_p of the top-k tokens' mass."""
    order = reference_order(row)[:top_k]
    total, mass, kept = sum(row[i] for i in order), 0.0, []
    for token_id in order:
        kept.append(token_id)
        mass += row[token_id]
        if top_p < 1.0 and mass >= top_p * total:
            break
    return set(kept)


@given(TIED_ROWS, st.integers(1, 30))
def test_the_k_largest_are_taken_with_ties_by_lowest_id(rows: list[list[float]], k: int) -> None:
    values, indices = exact_top_k(torch.tensor(rows), k)
    assert indices.tolist() == [reference_order(row)[:k] for row in rows]
    assert values.tolist() == [[row[i] for i in reference_order(row)[:k]] for row in rows]


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, -1.5, float("-inf"), 3e38, -3e38, 1e-40]), min_size=1), st.data())
def test_a_device_takes_the_same_without_being_asked_for_ties(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(row)))
    values, indices = _top_k_by_keys(torch.tensor([row, row[::-1]]), k)
    assert indices.tolist() == [reference_order(row)[:k], reference_order(row[::-1])[:k]]
    assert torch.equal(values[0], torch.tensor(row)[indices[0]])


@pytest.mark.parametrize("k", [1, 20, 64, 65, 300])
def test_ties_at_the_cut_of_a_large_vocabulary_go_to_the_lowest_ids(k: int) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(k)).bfloat16().float()
    _, indices = exact_top_k(logits, k)
    assert indices.tolist() == [reference_order(row)[:k] for row in logits.tolist()]


@pytest.mark.parametrize("k", [1, *(pytest.param(k, marks=pytest.mark.full) for k in (50, 200)), 150])
def test_rows_of_every_kind_are_cut_exactly_in_one_call(k: int) -> None:
    """Ties, a row of one value, rows mostly or wholly of minus infinity: each beside the others and alone."""
    logits = torch.randn(7, 20_000, generator=torch.Generator().manual_seed(k)) * 4
    logits[1] = logits[1].bfloat16()
    logits[2] = logits[2].round()
    logits[3] = 1.5
    logits[4, 100:] = -torch.inf
    logits[5] = -torch.inf
    for rows in ([0, 1, 6], [0, 2], [0, 4], range(7), *[[row] for row in range(7)]):
        _, indices = exact_top_k(logits[list(rows)], k)
        assert indices.tolist() == [reference_order(row)[:k] for row in logits[list(rows)].tolist()]


def test_a_row_that_is_no_number_disturbs_no_other() -> None:
    logits = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0))
    logits[1, 77] = torch.nan
    _, indices = exact_top_k(logits, 50)
    assert [indices[row].tolist() for row in (0, 2)] == [reference_order(logits[row].tolist())[:50] for row in (0, 2)]


@settings(max_examples=200)
@given(TIED_ROW.filter(any), st.integers(1, 40), st.sampled_from([0.0, 0.125, 0.5, 0.75, 1.0]))
def test_the_mask_is_the_smallest_set_that_reaches_the_mass(row: list[float], top_k: int, top_p: float) -> None:
    top_k = min(top_k, len(row))
    mask = top_k_top_p_mask(torch.tensor([row]), torch.tensor([top_k]), torch.tensor([top_p]).double())
    assert set(mask[0].nonzero().flatten().tolist()) == reference_set(row, top_k, top_p)


@settings(max_examples=200)
@given(TIED_ROW.filter(any), st.integers(1, 40), st.sampled_from([0.0, 0.125, 0.5, 0.75, 1.0]))
def test_the_prefix_of_candidates_is_the_same_set(row: list[float], top_k: int, top_p: float) -> None:
    top_k = min(top_k, len(row))
    weights, token_ids = exact_top_k(torch.tensor([row]), len(row))
    cumulative = weights.double().cumsum(dim=-1)
    kept = num_kept(cumulative, torch.tensor([top_k]), torch.tensor([top_p]).double(), cumulative[:, top_k - 1])
    assert set(token_ids[0, : int(kept)].tolist()) == reference_set(row, top_k, top_p)
