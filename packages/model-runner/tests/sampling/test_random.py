"""Counter-based random numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmstack_model_runner.sampling.random import seeds_array, uniforms

SEEDS = st.integers(min_value=-(2**63), max_value=2**64)


def draw(seed: int, index: int) -> float:
    return float(uniforms(seeds_array([seed]), np.array([index]))[0])


@given(st.lists(st.tuples(SEEDS, st.integers(0, 2**31)), min_size=1, max_size=20))
def test_a_draw_depends_on_its_own_seed_and_index_only(pairs: list[tuple[int, int]]) -> None:
    together = uniforms(seeds_array([seed for seed, _ in pairs]), np.array([index for _, index in pairs]))
    assert together.tolist() == [draw(seed, index) for seed, index in pairs]
    assert all(0.0 <= value < 1.0 for value in together)


def chi_square(values: np.ndarray, num_bins: int) -> float:
    counts = np.bincount((values * num_bins).astype(int), minlength=num_bins)
    expected = len(values) / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_indices_of_one_seed_are_uniform() -> None:
    # 99 degrees of freedom: mean 99, standard deviation 14.1.
    values = uniforms(seeds_array([1234] * 100_000), np.arange(100_000))
    assert chi_square(values, 100) < 160


def test_neighbouring_seeds_at_one_index_are_uniform() -> None:
    values = uniforms(seeds_array(range(100_000)), np.zeros(100_000, dtype=np.int64))
    assert chi_square(values, 100) < 160


def test_successive_draws_are_uncorrelated() -> None:
    values = uniforms(seeds_array([7] * 100_001), np.arange(100_001))
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.015
    pairs = np.floor(values[:-1] * 10) / 10 + values[1:] / 10
    assert chi_square(pairs, 100) < 160
