"""The Triton kernel of encoders' attention agrees with float64, for heads in one part and in two."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.bidirectional_attention import triton as kernels

# Of the interpreter itself, where a loop ends at an argument.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

NUM_HEADS = 2
TOLERANCE = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def inputs(num_tokens: int, head_dim: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Queries, keys and values, which lie among each other and among numbers that are no inputs."""
    projected = torch.full((num_tokens + 40, 3, NUM_HEADS + 1, head_dim), torch.nan, dtype=dtype, device=device)
    values = torch.randn(num_tokens, 3, NUM_HEADS, head_dim, device=device)
    projected[:num_tokens, :, :NUM_HEADS] = values.to(dtype)
    return list(projected[:num_tokens, :, :NUM_HEADS].unbind(1))


@pytest.mark.parametrize("head_dim", [8, 72, *(pytest.param(size, marks=pytest.mark.full) for size in (64, 80, 96))])
def test_the_kernel_agrees_with_float64(head_dim: int, triton_dtype: torch.dtype, triton_device: str) -> None:
    starts, scale = [0, 9, 18, 90], head_dim**-0.5
    query, key, value = inputs(90, head_dim, triton_dtype, triton_device)
    out = kernels.bidirectional_attention(query, key, value, starts, scale)
    assert out.dtype == triton_dtype
    for start, end in pairwise(starts):
        q, k, v = (tensor[start:end].double() for tensor in (query, key, value))
        weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        torch.testing.assert_close(out[start:end].double(), expected, rtol=0, atol=TOLERANCE[triton_dtype])


def test_a_query_does_not_depend_on_its_neighbours(triton_dtype: torch.dtype, triton_device: str) -> None:
    starts = [0, 30, 60, 100]
    query, key, value = inputs(100, 72, triton_dtype, triton_device)
    together = kernels.bidirectional_attention(query, key, value, starts, 0.1)
    for start, end in pairwise(starts):
        row = slice(start, end)
        alone = kernels.bidirectional_attention(query[row], key[row], value[row], [0, end - start], 0.1)
        assert torch.equal(alone, together[row])
    some = kernels.bidirectional_attention(query[20:77], key, value, starts, 0.1, 20)
    assert torch.equal(some, together[20:77])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_that_is_no_number_does_not_spread(triton_device: str) -> None:
    query, key, value = inputs(50, 24, torch.float32, triton_device)
    for tensor in (query, key, value):
        tensor[10:20] = torch.nan
    out = kernels.bidirectional_attention(query, key, value, [0, 10, 20, 50], 0.2)
    assert out.isnan().flatten(1).all(1).nonzero().flatten().tolist() == list(range(10, 20))
