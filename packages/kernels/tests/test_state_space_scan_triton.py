"""The Triton scan of Mamba-2 agrees with the reference, and no cut of a row changes a bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_helpers.scans import check_agrees, check_cuts

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.state_space_scan import ScanInputs, reference
from llmstack_kernels.state_space_scan import triton as kernels

SHAPES = [(2, 4, 16, 16), (1, 3, 24, 40), (1, 1, 8, 5)]  # groups, heads, state size, head size


def make_inputs(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> ScanInputs:
    num_groups, num_heads, state_size, head_dim = shape
    width = num_heads * head_dim + 2 * num_groups * state_size
    mixed = torch.randn(num_tokens, width + 7, device=device).to(dtype)
    steps = torch.randn(num_tokens, num_heads + 3, device=device).to(dtype)  # slices of a wider projection
    heads = torch.randn(3, num_heads, device=device)
    return ScanInputs(mixed[:, 7:], steps[:, :num_heads], *heads, num_groups, (0.1, 2.0))


def tokens(inputs: ScanInputs, start: int, end: int) -> ScanInputs:
    return replace(inputs, mixed=inputs.mixed[start:end], steps=inputs.steps[start:end])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_drafts_agree_with_the_reference(
    shape: tuple[int, int, int, int], triton_dtype: torch.dtype, triton_device: str
) -> None:
    inputs = make_inputs(9, shape, triton_dtype, triton_device)
    states = torch.randn(7, *shape[1:], device=triton_device)
    check_agrees(kernels.state_space_scan, reference.state_space_scan, inputs, states)


def test_no_cut_changes_a_bit(triton_device: str) -> None:
    shape = SHAPES[0][1:]
    inputs = make_inputs(7, SHAPES[0], torch.float32, triton_device)
    check_cuts(
        kernels.state_space_scan, tokens, inputs, lambda count: torch.randn(count, *shape, device=triton_device),
        [1, 4, 2],
    )  # fmt: skip
