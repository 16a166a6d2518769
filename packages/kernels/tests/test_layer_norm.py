"""Layer norms follow their formula and keep rows apart."""

from __future__ import annotations

import pytest
import torch

from llmstack_kernels.layer_norm import layer_norm


def test_the_norm_follows_its_formula() -> None:
    x, weight, bias = torch.randn(5, 48), torch.randn(48), torch.randn(48)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer_norm(x, weight, None, 1e-5), expected - bias, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((33, 768), (768,), (768,)))
    whole = layer_norm(x, weight, bias, 1e-5)
    assert all(torch.equal(layer_norm(x[row : row + 1], weight, bias, 1e-5)[0], whole[row]) for row in range(33))


def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        layer_norm(torch.zeros(2, 3), torch.zeros(2), None, 1e-6)
