"""The Triton scan of Mamba-2 agrees with the reference, and no cut of a row changes a bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_helpers.states import make_rows

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.state_space_scan import ScanInputs, reference
from llmstack_kernels.state_space_scan import triton as kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [(2, 4, 16, 16), (1, 3, 24, 40), (1, 1, 8, 5)]  # groups, heads, state size, head size


def make_inputs(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> ScanInputs:
    num_groups, num_heads, state_size, head_dim = shape
    width = num_heads * head_dim + 2 * num_groups * state_size
    mixed = torch.randn(num_tokens, width + 7, device=device).to(dtype)
    steps = torch.randn(num_tokens, num_heads + 3, device=device).to(dtype)  # slices of a wider projection
    heads = torch.randn(3, num_heads, device=device)
    return ScanInputs(mixed[:, 7:], steps[:, :num_heads], *heads, num_groups, (0.1, 2.0))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_drafts_agree_with_the_reference(
    shape: tuple[int, int, int, int], triton_dtype: torch.dtype, triton_device: str
) -> None:
    inputs, states = (
        make_inputs(9, shape, triton_dtype, triton_device),
        torch.randn(7, *shape[1:], device=triton_device),
    )
    rows, expected_states = make_rows([5, 1, 3], [5, 0, 2], device=triton_device), states.clone()
    expected = reference.state_space_scan(inputs, expected_states, rows)
    out = kernels.state_space_scan(inputs, states, rows)
    assert out.dtype == triton_dtype
    tolerance = TOLERANCE[triton_dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)


def test_no_cut_changes_a_bit(triton_device: str) -> None:
    shape = SHAPES[0]
    inputs, states = (
        make_inputs(7, shape, torch.float32, triton_device),
        torch.randn(9, *shape[1:], device=triton_device),
    )
    whole = kernels.state_space_scan(inputs, states, make_rows([7], device=triton_device))
    expected, start = states[2].clone(), 0
    for block, count in enumerate([1, 4, 2], start=1):
        own = slice(start, start + count)
        part, rows = (
            replace(inputs, mixed=inputs.mixed[own], steps=inputs.steps[own]),
            make_rows([count], None, block, triton_device),
        )
        assert torch.equal(kernels.state_space_scan(part, states, rows), whole[own])
        start += count
    assert torch.equal(states[4], expected)
