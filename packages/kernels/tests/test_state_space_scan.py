"""The scan of Mamba-2 follows its recurrence, and no cut of a row changes a bit of what it computes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kernel_helpers.backends import cpu_backend
from kernel_helpers.scans import check_cuts, check_drafts, check_neighbours
from kernel_helpers.states import make_rows, make_states

from llmstack_kernels.state_space_scan import ScanInputs, native, reference, state_space_scan

SHAPES = [(2, 4, 16, 16), (1, 3, 24, 40), (2, 2, 128, 72), (1, 1, 8, 5)]  # groups, heads, state size, head size


def make_inputs(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> ScanInputs:
    num_groups, num_heads, state_size, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    width = num_heads * head_dim + 2 * num_groups * state_size
    mixed, steps = numbers(num_tokens, width + 7).to(dtype), numbers(num_tokens, num_heads + 3).to(dtype)
    heads = numbers(num_heads) - 2, numbers(num_heads), numbers(num_heads)
    return ScanInputs(mixed[:, 7:], steps[:, :num_heads], *heads, num_groups)  # slices of a wider projection


def tokens(inputs: ScanInputs, start: int, end: int) -> ScanInputs:
    return replace(inputs, mixed=inputs.mixed[start:end], steps=inputs.steps[start:end])


def recurrence(inputs: ScanInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row in float64, written out head by head and number by number of the formula."""
    num_heads, state_size, head_dim = state.shape
    of_inputs, of_group = num_heads * head_dim, inputs.num_groups * state_size
    state, outs = state.double(), []
    for token in range(len(inputs.mixed)):
        x, taken, asked = inputs.mixed[token].double().split([of_inputs, of_group, of_group])
        for head in range(num_heads):
            place = head // (num_heads // inputs.num_groups) * state_size
            own = x[head * head_dim : (head + 1) * head_dim]
            step = torch.log1p((inputs.steps[token, head].double() + inputs.step_bias[head].double()).exp())
            step = step.clamp(*inputs.limits)
            decay = torch.exp(-inputs.log_decay[head].double().exp() * step)
            state[head] = state[head] * decay + torch.outer(taken[place : place + state_size], step * own)
            outs.append(asked[place : place + state_size] @ state[head] + inputs.skip[head].double() * own)
    return torch.stack(outs).view(len(inputs.mixed), of_inputs), state


backend = cpu_backend(reference, native)


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.5, 0.9)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_backends_follow_the_recurrence(
    backend: ModuleType, shape: tuple[int, int, int, int], limits: tuple[float, float]
) -> None:
    states, inputs = make_states(3, shape[1:]), replace(make_inputs(37, shape, torch.float32), limits=limits)
    expected, state = recurrence(inputs, states[1].clone())
    out = backend.state_space_scan(inputs, states, make_rows([37]))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[2].double(), state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inputs_of_16_bits_round_the_result_alone(dtype: torch.dtype) -> None:
    shape = SHAPES[1]
    inputs, states, wide = make_inputs(9, shape, dtype), make_states(7, shape[1:]), make_states(7, shape[1:])
    out = state_space_scan(inputs, states, make_rows([5, 1, 3]))
    as_floats = replace(inputs, mixed=inputs.mixed.float(), steps=inputs.steps.float())
    assert torch.equal(out, state_space_scan(as_floats, wide, make_rows([5, 1, 3])).to(dtype))
    assert torch.equal(states, wide)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cuts", [[1] * 23, [7, 16]], ids=str)
def test_no_cut_changes_a_bit(backend: ModuleType, shape: tuple[int, int, int, int], cuts: list[int]) -> None:
    inputs = make_inputs(23, shape, torch.float32)
    check_cuts(backend.state_space_scan, tokens, inputs, lambda count: make_states(count, shape[1:]), cuts)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_does_not_depend_on_its_neighbours(backend: ModuleType, num_threads: int) -> None:
    shape = SHAPES[2]
    inputs = make_inputs(20, shape, torch.float32)
    check_neighbours(backend.state_space_scan, tokens, inputs, lambda count: make_states(count, shape[1:]), num_threads)


def test_drafts_are_answered_and_change_no_block(backend: ModuleType) -> None:
    shape = SHAPES[0]
    inputs = make_inputs(12, shape, torch.float32)
    check_drafts(backend.state_space_scan, tokens, inputs, lambda count: make_states(count, shape[1:]))


def test_what_does_not_fit_is_refused() -> None:
    shape = SHAPES[0]
    inputs, states, rows = make_inputs(3, shape, torch.float32), make_states(3, shape[1:]), make_rows([3])
    for changed, message in (
        ((inputs, states[:, :, :8]), "do not fit states"),
        ((inputs, states.bfloat16()), "must be float32"),
        ((replace(inputs, steps=inputs.steps[:, :2]), states), "steps must be"),
        ((replace(inputs, skip=inputs.skip.double()), states), "skip must be"),
    ):
        with pytest.raises(ValueError, match=message):
            state_space_scan(*changed, rows)
