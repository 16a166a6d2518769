"""Argmax equals NumPy's: lowest index of ties, NaN first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmstack_kernels.argmax import argmax

SIZES = [1, 7, 16, 17, 255, 256, 1000, 50257]


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_value_is_found_in_each_row(size: int) -> None:
    values = torch.randn(9, size)
    best, indices = argmax(values)
    assert np.array_equal(indices.numpy(), values.numpy().argmax(axis=-1))
    assert torch.equal(best, values.amax(dim=-1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf, -3.5])
def test_of_equal_values_the_first_one_counts(size: int, value: float) -> None:
    values = torch.full((2, size), value)
    values[1, : size // 2] = -torch.inf
    best, indices = argmax(values)
    assert indices.tolist() == values.numpy().argmax(axis=-1).tolist()
    assert best.tolist() == [value, value]


@pytest.mark.parametrize("place", [0, 5, 300, 999])
def test_what_is_no_number_is_found_before_anything_else(place: int) -> None:
    values = torch.randn(3, 1000)
    values[1, place:] = torch.nan
    best, indices = argmax(values)
    assert indices[1] == place
    assert best.isnan().tolist() == [False, True, False]


def test_other_types_and_no_rows() -> None:
    values = torch.randn(3, 100).to(torch.bfloat16)
    assert torch.equal(argmax(values)[0], values.amax(dim=-1))
    assert [len(found) for found in argmax(torch.zeros(0, 4))] == [0, 0]
    with pytest.raises(ValueError, match="num_rows"):
        argmax(torch.zeros(2, 0))
