"""The rotary embedding rotates pairs of dimensions, so that products depend on distances only."""

from __future__ import annotations

import pytest
import torch

from llmstack_kernels.rotary_embedding import rotary_embedding


def table(max_positions: int, rotary_dim: int) -> torch.Tensor:
    frequencies = 100.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def test_each_pair_is_rotated_by_its_angle() -> None:
    cache = table(10, 8)
    query, key = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    positions = torch.tensor([0, 4, 9])
    rotated_query, rotated_key = rotary_embedding(positions, query, key, cache)
    for x, rotated in ((query, rotated_query), (key, rotated_key)):
        pairs = torch.complex(x[..., :4], x[..., 4:])
        angles = torch.complex(cache[positions, :4], cache[positions, 4:])[:, None]
        expected = pairs * angles
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1))
    assert torch.equal(rotated_query[0], query[0])


def test_products_depend_on_the_distance_only() -> None:
    cache = table(50, 16)
    query, key = torch.randn(1, 1, 16).expand(2, 1, 16), torch.randn(1, 1, 16).expand(2, 1, 16)
    rotated_query, _ = rotary_embedding(torch.tensor([7, 40]), query, key, cache)
    _, rotated_key = rotary_embedding(torch.tensor([2, 35]), query, key, cache)
    first, second = (rotated_query * rotated_key).sum((1, 2))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_dimensions_past_the_rotary_ones_pass_through() -> None:
    query, key = torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    rotated, _ = rotary_embedding(torch.tensor([3, 5]), query, key, table(10, 4))
    assert torch.equal(rotated[..., 4:], query[..., 4:])
    assert not torch.equal(rotated[..., :4], query[..., :4])


def test_the_type_is_kept_and_computed_wide() -> None:
    query = torch.randn(2, 1, 8, dtype=torch.bfloat16)
    rotated, _ = rotary_embedding(torch.tensor([3, 5]), query, query, table(10, 8))
    wide, _ = rotary_embedding(torch.tensor([3, 5]), query.float(), query.float(), table(10, 8))
    assert torch.equal(rotated, wide.bfloat16())


def test_odd_and_too_large_rotary_dimensions_are_refused() -> None:
    x = torch.zeros(1, 1, 4)
    for rotary_dim in (3, 6):
        with pytest.raises(ValueError, match="rotary dimension"):
            rotary_embedding(torch.tensor([0]), x, x, torch.zeros(1, rotary_dim))
