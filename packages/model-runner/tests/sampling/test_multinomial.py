"""Inverting distribution functions."""

from __future__ import annotations

import pytest
import torch

from llmstack_model_runner.sampling import multinomial


@pytest.mark.parametrize("width", [1, 5, 127, 128, 129, 1000])
def test_blocks_find_what_one_cumulative_sum_finds(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(400, width, generator=generator)
    weights[:, 1::3] = 0.0
    uniforms = torch.rand(400, generator=generator, dtype=torch.float64)
    cumulative = weights.double().cumsum(dim=-1)
    expected = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    assert multinomial.invert(weights, uniforms).tolist() == expected.tolist()


def test_tokens_without_mass_are_never_chosen_at_the_ends_of_the_range() -> None:
    weights = torch.zeros(2, 300)
    weights[:, 130] = 1.0
    uniforms = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert multinomial.invert(weights, uniforms).tolist() == [130, 130]
    cumulative = weights.double().cumsum(dim=-1)
    assert multinomial.invert_prefix(cumulative, torch.tensor([300, 200]), uniforms).tolist() == [130, 130]


def test_a_row_of_nan_or_without_mass_gets_some_token_and_changes_no_other_row() -> None:
    weights = torch.ones(3, 200)
    weights[0] = torch.nan
    weights[1] = 0.0
    chosen = multinomial.invert(weights, torch.full((3,), 0.5, dtype=torch.float64)).tolist()
    assert chosen[2] == 100
    assert all(0 <= token_id < 200 for token_id in chosen)
