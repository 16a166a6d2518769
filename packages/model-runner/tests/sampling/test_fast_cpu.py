"""Passes over whole logits on a CPU."""

from __future__ import annotations

import torch

from llmstack_model_runner.sampling.fast_cpu import exponentiate


def test_exponentials_are_zero_where_they_would_be_no_normal_numbers() -> None:
    values = torch.tensor([[0.0, -1.0, -80.0, -87.5, -104.0, -1e30, -torch.inf]] * 40)
    expected = values.exp().where(values > -87.0, 0.0)
    exponentiate(values)
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=0.0)
    assert (values[:, 3:] == 0.0).all()


def test_the_exponential_of_what_is_no_number_is_none() -> None:
    values = torch.tensor([[0.0, torch.nan]])
    exponentiate(values)
    assert values.isnan().tolist() == [[False, True]]
