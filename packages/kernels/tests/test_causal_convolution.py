"""Causal convolutions follow their formula, and no cut of a row changes a bit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from kernel_helpers.backends import cpu_backend

from llmstack_kernels.causal_convolution import causal_convolution, native, reference
from llmstack_kernels.state_rows import StateRows

backend = cpu_backend(reference, native)


def make_rows(counts: list[int], known: list[int] | None = None, first_block: int = 1) -> StateRows:
    """Row i reads block `first_block` + 2 i, and writes the one behind it."""
    sources = torch.arange(len(counts)) * 2 + first_block
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return StateRows(starts, sources, sources + 1, torch.tensor(known or counts))


@pytest.mark.parametrize(("length", "num_channels"), [(2, 5), (3, 64), (4, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_all_backends_follow_the_formula(
    backend: ModuleType, length: int, num_channels: int, dtype: torch.dtype, activation: str
) -> None:
    inputs = torch.randn(9, num_channels + 3).to(dtype)[:, 3:]  # slices of a wider projection
    taps, bias, tails = (
        torch.randn(length, num_channels),
        torch.randn(num_channels),
        torch.randn(5, length - 1, num_channels),
    )
    tails = torch.cat([tails.to(dtype), torch.zeros(5, 1, num_channels).to(dtype)], 1)[:, :-1]  # of other layers too
    padded = [torch.cat([tails[1], inputs[:6]]).double(), torch.cat([tails[3], inputs[6:]]).double()]
    out = backend.causal_convolution(inputs, taps, bias, tails, make_rows([6, 3], known=[4, 0]), activation)
    expected = torch.cat(
        [
            sum((rows[tap : tap + len(rows) - length + 1] * taps[tap] for tap in range(length)), bias.double())
            for rows in padded
        ]
    )
    if activation == "silu":
        expected = expected * torch.sigmoid(expected)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(tails[2].double(), padded[0][4 : 4 + length - 1])
    assert torch.equal(tails[4], tails[3])


@pytest.mark.parametrize("cuts", [[1] * 11, [4, 7], [10, 1], [2, 2, 7]], ids=str)
def test_no_cut_changes_a_bit(backend: ModuleType, cuts: list[int]) -> None:
    inputs, taps, tails = torch.randn(11, 70), torch.randn(4, 70), torch.randn(20, 3, 70)
    whole = backend.causal_convolution(inputs, taps, None, tails, make_rows([11]), "silu")
    expected, start = tails[2].clone(), 0
    for block, count in enumerate(cuts, start=1):
        own = slice(start, start + count)
        found = backend.causal_convolution(
            inputs[own], taps, None, tails, make_rows([count], first_block=block), "silu"
        )
        assert torch.equal(found, whole[own])
        start += count
    assert torch.equal(tails[len(cuts) + 1], expected)


def test_what_does_not_fit_is_refused() -> None:
    inputs, taps, tails = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match="do not fit inputs"):
        causal_convolution(inputs, taps, None, tails[:, :1], make_rows([3]))
    with pytest.raises(ValueError, match="float32"):
        causal_convolution(inputs, taps.double(), None, tails, make_rows([3]))
    with pytest.raises(ValueError, match="bfloat16"):
        causal_convolution(inputs, taps, None, tails.bfloat16(), make_rows([3]))
    with pytest.raises(ValueError, match="unknown"):
        causal_convolution(inputs, taps, None, tails, make_rows([3]), "gelu")
    with pytest.raises(ValueError, match="no more than 3 tokens"):
        causal_convolution(inputs, taps, None, tails, make_rows([1] * 4))
