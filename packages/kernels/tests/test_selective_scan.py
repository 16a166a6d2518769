"""The scan of Mamba-1 follows its recurrence, and no cut of a row changes a bit of what it computes."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kernel_helpers.backends import cpu_backend
from kernel_helpers.scans import check_cuts, check_drafts, check_neighbours
from kernel_helpers.states import make_rows, make_states

from llmstack_kernels.selective_scan import SelectiveInputs, native, reference, selective_scan

SHAPES = [(16, 128), (16, 200), (5, 3), (1, 65)]  # state size, channels


def make_inputs(num_tokens: int, shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> SelectiveInputs:
    state_size, num_channels = shape
    generator = torch.Generator().manual_seed(seed)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    joined = numbers(num_tokens, 2 * state_size + 3).to(dtype)  # slices of a wider projection
    return SelectiveInputs(
        numbers(num_tokens, num_channels + 7).to(dtype)[:, 7:], numbers(num_tokens, num_channels).to(dtype),
        joined[:, 3 : 3 + state_size], joined[:, 3 + state_size :],
        numbers(state_size, num_channels) - 1, numbers(num_channels), numbers(num_channels),
    )  # fmt: skip


def tokens(inputs: SelectiveInputs, start: int, end: int) -> SelectiveInputs:
    own = slice(start, end)
    return replace(inputs, **{name: getattr(inputs, name)[own] for name in ("x", "steps", "taken", "asked")})


def recurrence(inputs: SelectiveInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row in float64, channel by channel of the formula."""
    state, outs = state.double(), []
    for token in range(len(inputs.x)):
        for channel in range(state.shape[1]):
            x, step = inputs.x[token, channel].double(), inputs.steps[token, channel].double()
            step = torch.log1p((step + inputs.step_bias[channel].double()).exp())
            decay = torch.exp(-inputs.log_decay[:, channel].double().exp() * step)
            state[:, channel] = decay * state[:, channel] + inputs.taken[token].double() * step * x
            answer = inputs.asked[token].double() @ state[:, channel]
            outs.append(answer + inputs.skip[channel].double() * x)
    return torch.stack(outs).view(len(inputs.x), -1), state


backend = cpu_backend(reference, native)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_backends_follow_the_recurrence(backend: ModuleType, shape: tuple[int, int]) -> None:
    states, inputs = make_states(3, shape), make_inputs(37, shape, torch.float32)
    expected, state = recurrence(inputs, states[1].clone())
    out = backend.selective_scan(inputs, states, make_rows([37]))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[2].double(), state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_of_16_bits_round_the_result_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs, states, wide = make_inputs(9, shape, dtype), make_states(7, shape), make_states(7, shape)
    out = selective_scan(inputs, states, make_rows([5, 1, 3]))
    as_floats = {name: getattr(inputs, name).float() for name in ("x", "steps", "taken", "asked")}
    expected = selective_scan(replace(inputs, **as_floats), wide, make_rows([5, 1, 3]))
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(states, wide)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cuts", [[1] * 23, [7, 16], [22, 1], [1, 3, 19]], ids=str)
def test_no_cut_changes_a_bit(backend: ModuleType, shape: tuple[int, int], cuts: list[int]) -> None:
    inputs = make_inputs(23, shape, torch.float32)
    check_cuts(backend.selective_scan, tokens, inputs, lambda count: make_states(count, shape), cuts)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_does_not_depend_on_its_neighbours(backend: ModuleType, num_threads: int) -> None:
    shape = SHAPES[1]
    inputs = make_inputs(20, shape, torch.float32)
    check_neighbours(backend.selective_scan, tokens, inputs, lambda count: make_states(count, shape), num_threads)


def test_drafts_are_answered_and_change_no_block(backend: ModuleType) -> None:
    shape = SHAPES[0]
    inputs = make_inputs(12, shape, torch.float32)
    check_drafts(backend.selective_scan, tokens, inputs, lambda count: make_states(count, shape))


def test_what_does_not_fit_is_refused() -> None:
    inputs, states = make_inputs(3, SHAPES[0], torch.float32), make_states(3, SHAPES[0])
    with pytest.raises(ValueError, match="do not fit states"):
        selective_scan(inputs, states[:, :, :8], make_rows([3]))
    with pytest.raises(ValueError, match="must be float32"):
        selective_scan(inputs, states.bfloat16(), make_rows([3]))
    with pytest.raises(ValueError, match="log_decay"):
        selective_scan(replace(inputs, skip=inputs.skip.bfloat16()), states, make_rows([3]))
