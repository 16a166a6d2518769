"""The Triton scan of Mamba-1 agrees with the reference, and no cut of a row changes a bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_helpers.scans import check_agrees, check_cuts

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.selective_scan import SelectiveInputs, reference
from llmstack_kernels.selective_scan import triton as kernels

SHAPES = [(16, 70), (5, 3)]  # state size, channels


def make_inputs(num_tokens: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> SelectiveInputs:
    state_size, num_channels = shape
    joined = torch.randn(num_tokens, 2 * state_size + 3, device=device).to(dtype)  # slices of a wider projection
    x, steps = torch.randn(2, num_tokens, num_channels + 7, device=device).to(dtype)[..., 7:]
    return SelectiveInputs(
        x, steps, joined[:, 3 : 3 + state_size], joined[:, 3 + state_size :],
        torch.randn(*shape, device=device), *torch.randn(2, num_channels, device=device),
    )  # fmt: skip


def tokens(inputs: SelectiveInputs, start: int, end: int) -> SelectiveInputs:
    own = slice(start, end)
    return replace(inputs, **{name: getattr(inputs, name)[own] for name in ("x", "steps", "taken", "asked")})


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_drafts_agree_with_the_reference(
    shape: tuple[int, int], triton_dtype: torch.dtype, triton_device: str
) -> None:
    inputs = make_inputs(9, shape, triton_dtype, triton_device)
    check_agrees(kernels.selective_scan, reference.selective_scan, inputs, torch.randn(7, *shape, device=triton_device))


def test_no_cut_changes_a_bit(triton_device: str) -> None:
    shape = SHAPES[0]
    inputs = make_inputs(7, shape, torch.float32, triton_device)
    check_cuts(
        kernels.selective_scan,
        tokens,
        inputs,
        lambda count: torch.randn(count, *shape, device=triton_device),
        [1, 4, 2],
    )
