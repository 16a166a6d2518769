"""The Triton rotary embedding agrees with its float64 reference, for any share of a head that is rotated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.rotary_embedding import triton as kernels

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def table(max_positions: int, rotary_dim: int, device: str) -> torch.Tensor:
    frequencies = 100.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def exact(positions: torch.Tensor, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    half = cache.shape[1] // 2
    cos, sin = cache.double()[positions, None].chunk(2, dim=-1)
    wide = x.double()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


# Heads, KV heads, their size, how much of it is rotated.
SHAPES = [(4, 2, 16, 16), (3, 1, 20, 12), (70, 1, 8, 8), (1, 1, 128, 128), (2, 2, 10, 2)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "rotary_dim"), SHAPES)
def test_slices_of_a_projection_are_rotated_as_float64(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    positions = torch.tensor([0, 9, 4], device=triton_device)
    projection = torch.randn(3, num_heads + 2 * num_kv_heads, head_dim, device=triton_device).to(triton_dtype)
    query, key, _ = projection.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cache = table(10, rotary_dim, triton_device)
    before = projection.clone()
    rotated = kernels.rotary_embedding(positions, query, key, cache)
    assert torch.equal(projection, before)
    tolerance = TOLERANCE[triton_dtype]
    for x, out in zip((query, key), rotated, strict=True):
        assert (out.dtype, out.is_contiguous()) == (triton_dtype, True)
        torch.testing.assert_close(out.double(), exact(positions, x, cache), atol=tolerance, rtol=tolerance)
        assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])
        assert torch.equal(out[0], x[0])  # position 0


def test_dimensions_may_lie_apart(triton_device: str) -> None:
    positions, cache = torch.tensor([5, 2], device=triton_device), table(10, 8, triton_device)
    query = torch.randn(2, 8, 3, device=triton_device).transpose(1, 2)
    one, _ = kernels.rotary_embedding(positions, query, query, cache)
    other, _ = kernels.rotary_embedding(positions, query.contiguous(), query.contiguous(), cache)
    assert torch.equal(one, other)


def test_a_token_does_not_depend_on_its_neighbours(triton_dtype: torch.dtype, triton_device: str) -> None:
    positions, cache = torch.arange(7, device=triton_device), table(10, 12, triton_device)
    query = torch.randn(7, 5, 16, device=triton_device).to(triton_dtype)
    whole, _ = kernels.rotary_embedding(positions, query, query[:, :2], cache)
    for token in (0, 3, 6):
        part = slice(token, token + 1)
        alone, _ = kernels.rotary_embedding(positions[part], query[part], query[part, :2], cache)
        assert torch.equal(alone[0], whole[token])
