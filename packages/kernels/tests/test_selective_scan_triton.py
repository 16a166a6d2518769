"""The Triton scan of Mamba-1 agrees with the reference, and no cut of a row changes a bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_helpers.states import make_rows

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.selective_scan import SelectiveInputs, reference
from llmstack_kernels.selective_scan import triton as kernels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [(16, 70), (5, 3)]  # state size, channels


def make_inputs(num_tokens: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> SelectiveInputs:
    state_size, num_channels = shape
    joined = torch.randn(num_tokens, 2 * state_size + 3, device=device).to(dtype)  # slices of a wider projection
    x, steps = torch.randn(2, num_tokens, num_channels + 7, device=device).to(dtype)[..., 7:]
    return SelectiveInputs(
        x, steps, joined[:, 3 : 3 + state_size], joined[:, 3 + state_size :],
        torch.randn(*shape, device=device), *torch.randn(2, num_channels, device=device),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_drafts_agree_with_the_reference(
    shape: tuple[int, int], triton_dtype: torch.dtype, triton_device: str
) -> None:
    inputs = make_inputs(9, shape, triton_dtype, triton_device)
    states = torch.randn(7, *shape, device=triton_device)
    rows, expected_states = make_rows([5, 1, 3], [5, 0, 2], device=triton_device), states.clone()
    expected = reference.selective_scan(inputs, expected_states, rows)
    out = kernels.selective_scan(inputs, states, rows)
    assert out.dtype == triton_dtype
    tolerance = TOLERANCE[triton_dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)


def test_no_cut_changes_a_bit(triton_device: str) -> None:
    shape = SHAPES[0]
    inputs = make_inputs(7, shape, torch.float32, triton_device)
    states = torch.randn(9, *shape, device=triton_device)
    whole = kernels.selective_scan(inputs, states, make_rows([7], device=triton_device))
    expected, start = states[2].clone(), 0
    for block, count in enumerate([1, 4, 2], start=1):
        own = slice(start, start + count)
        part = replace(inputs, **{name: getattr(inputs, name)[own] for name in ("x", "steps", "taken", "asked")})
        found = kernels.selective_scan(part, states, make_rows([count], None, block, triton_device))
        assert torch.equal(found, whole[own])
        start += count
    assert torch.equal(states[4], expected)
