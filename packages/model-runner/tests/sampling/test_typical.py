"""Typical sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_model_runner.sampling import typical
from llmstack_model_runner.sampling.typical import typical_mask

SHARES = st.lists(st.sampled_from([0.001, 0.2, 0.5, 0.9, 0.9999]), min_size=3, max_size=3)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 3000), st.sampled_from([0.01, 1.0, 5.0, 40.0]), SHARES)
def test_bins_find_what_sorting_finds(seed: int, vocab_size: int, spread: float, shares: list[float]) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    weights[1, ::3] = 0.0
    weights[2] = weights[2].bfloat16()  # ties
    if not weights[1].any():
        weights[1, 1] = 1.0
    log_weights = weights.log()
    mass = weights.double().sum(dim=-1)
    mean = torch.xlogy(weights, weights).double().sum(dim=-1) / mass
    distances = (log_weights - mean[:, None].float()).abs()
    arguments = (weights, distances, torch.tensor(shares).double() * mass)
    assert torch.equal(typical._nearest_by_bins(*arguments), typical._nearest_by_sorting(*arguments))


def test_the_most_likely_token_may_be_atypical() -> None:
    """Entropy of (0.5, 0.1, ...): 1.5 nats; the surprise of 0.1 is 2.3, that of 0.5 is 0.7: the latter comes first."""
    weights = torch.tensor([[0.5] + [0.1] * 5, [0.9] + [0.02] * 5, [0.4, 0.2, 0.1, 0.1, 0.1, 0.1]])
    mask = typical_mask(weights, torch.tensor([0.3, 0.3, 0.25]).double())
    assert [row.nonzero().flatten().tolist() for row in mask] == [[0], [0], [1, 2]]


@pytest.mark.parametrize("weights", [[torch.nan, 1.0], [0.0, 0.0]])
def test_a_row_without_a_distribution_disturbs_no_other(weights: list[float]) -> None:
    rows = torch.tensor([weights, [0.5, 0.5], [1.0, 0.0]])
    mask = typical_mask(rows, torch.tensor([0.5, 0.4, 0.9]).double())
    assert mask[1:].tolist() == [[True, False], [True, False]]


def test_one_keeps_everything() -> None:
    assert typical_mask(torch.rand(1, 50), torch.ones(1).double()).all()
