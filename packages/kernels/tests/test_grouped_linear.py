"""Rows go through the experts that were chosen for them, on whatever device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from llmstack_kernels.grouped_linear import group_rows, grouped_linear, pack_experts, reference, sum_choices
from llmstack_kernels.linear import QUANTIZATIONS, quantize

NUM_EXPERTS = 5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, weights, and two chosen experts for each token, never the first."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, 48, generator=generator)
    weights = torch.randn(NUM_EXPERTS, 64, 48, generator=generator) * 48**-0.5
    scores = torch.rand(num_tokens, NUM_EXPERTS - 1, generator=generator)
    return x.to(dtype), weights.to(dtype), 1 + scores.argsort(1)[:, :2]


def expect(x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
    rows_per_input = expert_ids.numel() // x.shape[0]
    ids = expert_ids.flatten().tolist()
    return torch.stack([weights[e].double() @ x[i // rows_per_input].double() for i, e in enumerate(ids)])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_a_row_goes_through_its_expert(num_tokens: int, dtype: torch.dtype) -> None:
    x, weights, expert_ids = make(num_tokens, dtype)
    groups, experts = group_rows(expert_ids, NUM_EXPERTS), pack_experts(weights)
    for inputs in (x, x.repeat_interleave(2, 0)):
        out = grouped_linear(inputs, experts, groups)
        assert out.dtype == dtype
        expected = expect(inputs, weights, expert_ids)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_gate_halves_the_output() -> None:
    x, weights, expert_ids = make(4, torch.float32)
    out = grouped_linear(x, pack_experts(weights), group_rows(expert_ids, NUM_EXPERTS), "silu_and_mul")
    gate, gated = expect(x, weights, expert_ids).chunk(2, dim=1)
    torch.testing.assert_close(out.double(), F.silu(gate) * gated, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_quantized_experts_are_those_their_numbers_stand_for(scheme: str) -> None:
    x, weights, expert_ids = make(4, torch.float32)
    out = grouped_linear(x, pack_experts(weights, scheme), group_rows(expert_ids, NUM_EXPERTS))
    rounded = torch.stack([quantize(weight, scheme).dequantize(torch.float64) for weight in weights])
    torch.testing.assert_close(out.double(), expect(x, rounded, expert_ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bit_equal_in_any_batch(dtype: torch.dtype) -> None:
    x, weights, expert_ids = make(40, dtype)
    experts = pack_experts(weights, is_batch_invariant=True)
    whole = grouped_linear(x, experts, group_rows(expert_ids, NUM_EXPERTS)).view(40, 2, 64)
    for start, end in ((0, 1), (39, 40), (3, 17)):
        part = grouped_linear(x[start:end], experts, group_rows(expert_ids[start:end], NUM_EXPERTS))
        assert torch.equal(part.view(end - start, 2, 64), whole[start:end])


def test_rows_are_sorted_by_expert_and_as_they_stood_within_one() -> None:
    groups = group_rows(torch.tensor([[3, 0], [0, 3], [3, 1]]), 4)
    assert groups.rows.tolist() == [1, 2, 5, 0, 3, 4]
    assert groups.starts.tolist() == [0, 2, 3, 3, 6]
    assert (groups.num_rows, groups.num_experts) == (6, 4)


def test_choices_are_summed_by_their_shares_and_an_empty_batch_passes() -> None:
    rows, shares = torch.randn(6, 8), torch.rand(3, 2)
    expected = (rows.view(3, 2, 8) * shares[:, :, None]).sum(1)
    torch.testing.assert_close(sum_choices(rows, shares), expected)
    assert torch.equal(reference.sum_choices(rows[2:4], shares[1:2]), sum_choices(rows, shares)[1:2])
    x, weights, expert_ids = make(1, torch.float32)
    empty = grouped_linear(x[:0], pack_experts(weights), group_rows(expert_ids[:0], NUM_EXPERTS))
    assert sum_choices(empty, torch.empty(0, 2)).shape == (0, 64)


def test_what_does_not_fit_is_refused() -> None:
    x, weights, expert_ids = make(3, torch.float32)
    groups, experts = group_rows(expert_ids, NUM_EXPERTS), pack_experts(weights)
    with pytest.raises(ValueError, match="weights"):
        pack_experts(weights[0])
    with pytest.raises(ValueError, match="expert_ids"):
        group_rows(expert_ids[0], NUM_EXPERTS)
    with pytest.raises(ValueError, match="inputs"):
        grouped_linear(x[:, :5], experts, groups)
    with pytest.raises(ValueError, match="rows for 3 tokens"):
        grouped_linear(x[:2], experts, groups)
    with pytest.raises(ValueError, match="experts"):
        grouped_linear(x, experts, group_rows(expert_ids, NUM_EXPERTS + 1))
    with pytest.raises(ValueError, match="activation"):
        grouped_linear(x, experts, groups, "swish")
    with pytest.raises(ValueError, match="shares"):
        sum_choices(x, torch.ones(3, 2))
