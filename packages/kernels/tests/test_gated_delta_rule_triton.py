"""The Triton gated delta rule agrees with the reference, and no cut of a row changes a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_helpers.scans import check_agrees, check_cuts

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.gated_delta_rule import DeltaRuleInputs, reference
from llmstack_kernels.gated_delta_rule import triton as kernels

SHAPES = [(2, 4, 16, 16), (1, 3, 24, 40), (1, 1, 8, 5)]  # key heads, value heads, dimensions


def make_inputs(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> DeltaRuleInputs:
    num_key_heads, num_heads, key_dim, value_dim = shape
    gates = torch.randn(num_tokens, 2 * num_heads + 3, device=device).to(dtype)  # slices of a wider projection
    width = 2 * num_key_heads * key_dim + num_heads * value_dim
    return DeltaRuleInputs(
        torch.randn(num_tokens, width + 7, device=device).to(dtype)[:, 7:], gates[:, :num_heads],
        gates[:, num_heads : 2 * num_heads], *torch.randn(2, num_heads, device=device), num_key_heads,
    )  # fmt: skip


def tokens(inputs: DeltaRuleInputs, start: int, end: int) -> DeltaRuleInputs:
    own = slice(start, end)
    return replace(inputs, mixed=inputs.mixed[own], decays=inputs.decays[own], rates=inputs.rates[own])


def make_matrices(num_blocks: int, shape: tuple[int, int, int, int], device: str) -> torch.Tensor:
    return torch.randn(num_blocks, *shape[1:], device=device)


VARIANTS: list[dict[str, Any]] = [
    {}, {"is_tiled": True}, {"rate_scale": 2.0, "lowest": -5.0}, {"has_row_decays": True},
    {"has_row_decays": True, "lowest": -5.0},
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_drafts_agree_with_the_reference(
    shape: tuple[int, int, int, int], triton_dtype: torch.dtype, triton_device: str, variant: dict[str, Any]
) -> None:
    inputs, matrices = make_inputs(9, shape, triton_dtype, triton_device), make_matrices(7, shape, triton_device)
    others = {name: value for name, value in variant.items() if name != "has_row_decays"}
    inputs = replace(inputs, **others)
    if "has_row_decays" in variant:
        count = shape[1] * shape[2]
        decays, bias = torch.randn(9, count, device=triton_device), torch.randn(count, device=triton_device)
        inputs = replace(inputs, decays=decays.to(triton_dtype), decay_bias=bias)
    check_agrees(kernels.gated_delta_rule, reference.gated_delta_rule, inputs, matrices)


def test_no_cut_changes_a_bit(triton_device: str) -> None:
    shape = SHAPES[0]
    inputs = make_inputs(7, shape, torch.float32, triton_device)
    check_cuts(
        kernels.gated_delta_rule, tokens, inputs, lambda count: make_matrices(count, shape, triton_device), [1, 4, 2]
    )
