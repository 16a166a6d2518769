"""The gated delta rule follows its recurrence, and no cut of a row changes a bit of what it computes."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from kernel_helpers.backends import cpu_backend
from kernel_helpers.scans import check_cuts, check_drafts, check_neighbours
from kernel_helpers.states import make_rows, make_states

from llmstack_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule, native, reference
from llmstack_kernels.state_rows import StateRows

SHAPES = [(2, 4, 16, 16), (1, 3, 24, 40), (2, 2, 128, 128), (1, 1, 8, 5)]  # key heads, value heads, dimensions


def make_inputs(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> DeltaRuleInputs:
    num_key_heads, num_heads, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    width = 2 * num_key_heads * key_dim + num_heads * value_dim
    gates = numbers(num_tokens, 2 * num_heads + 3).to(dtype)  # slices of a wider projection
    return DeltaRuleInputs(
        numbers(num_tokens, width + 7).to(dtype)[:, 7:], gates[:, :num_heads], gates[:, num_heads : 2 * num_heads],
        numbers(num_heads) - 2, numbers(num_heads), num_key_heads,
    )  # fmt: skip


def with_row_decays(inputs: DeltaRuleInputs, shape: tuple[int, int, int, int]) -> DeltaRuleInputs:
    """The same inputs, with a decay for each row of a matrix."""
    generator = torch.Generator().manual_seed(7)
    count = shape[1] * shape[2]
    decays = torch.randn(len(inputs.mixed), count + 3, generator=generator).to(inputs.mixed.dtype)[:, 3:]
    return replace(inputs, decays=decays, decay_bias=torch.randn(count, generator=generator))


def make_matrices(num_blocks: int, shape: tuple[int, int, int, int]) -> torch.Tensor:
    return make_states(num_blocks, shape[1:])


def tokens(inputs: DeltaRuleInputs, start: int, end: int) -> DeltaRuleInputs:
    own = slice(start, end)
    return replace(inputs, mixed=inputs.mixed[own], decays=inputs.decays[own], rates=inputs.rates[own])


def recurrence(inputs: DeltaRuleInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row in float64, written out head by head and number by number of the formula."""
    num_heads, key_dim, value_dim = state.shape
    num_keys = inputs.num_key_heads * key_dim
    state, outs = state.double(), []
    for token in range(len(inputs.mixed)):
        mixed = inputs.mixed[token].double()
        for head in range(num_heads):
            key_head = head % inputs.num_key_heads if inputs.is_tiled else head // (num_heads // inputs.num_key_heads)
            place = key_head * key_dim
            q, k = mixed[place : place + key_dim], mixed[num_keys + place : num_keys + place + key_dim]
            q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
            v = mixed[2 * num_keys + head * value_dim : 2 * num_keys + (head + 1) * value_dim]
            num_decays = inputs.decays.shape[1] // num_heads
            own = slice(head * num_decays, (head + 1) * num_decays)
            shifted = inputs.decays[token, own].double() + inputs.decay_bias[own].double()
            speed = inputs.log_decay[head].double().exp()
            if inputs.lowest is None:
                decay = torch.exp(-speed * torch.log1p(shifted.exp()))
            else:
                decay = torch.exp(inputs.lowest / (1 + torch.exp(-speed * shifted)))
            rate = inputs.rate_scale / (1 + torch.exp(-inputs.rates[token, head].double()))
            matrix = state[head] * decay[:, None]
            state[head] = matrix + torch.outer(k, rate * (v - k @ matrix))
            outs.append(q @ state[head] / key_dim**0.5)
    return torch.stack(outs).view(len(inputs.mixed), num_heads * value_dim), state


backend = cpu_backend(reference, native)


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_backends_follow_the_recurrence(
    backend: ModuleType, shape: tuple[int, int, int, int], is_tiled: bool
) -> None:
    matrices, inputs = make_matrices(3, shape), make_inputs(37, shape, torch.float32)
    inputs = replace(inputs, is_tiled=is_tiled)
    expected, state = recurrence(inputs, matrices[1].clone())
    out = backend.gated_delta_rule(inputs, matrices, make_rows([37]))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(matrices[2].double(), state, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lowest", [None, -5.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_row_of_a_matrix_may_have_its_decay(
    backend: ModuleType, shape: tuple[int, int, int, int], lowest: float | None
) -> None:
    matrices = make_matrices(3, shape)
    inputs = replace(with_row_decays(make_inputs(37, shape, torch.float32), shape), lowest=lowest)
    expected, state = recurrence(inputs, matrices[1].clone())
    out = backend.gated_delta_rule(inputs, matrices, make_rows([37]))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(matrices[2].double(), state, atol=2e-5, rtol=1e-4)


def test_rates_may_be_scaled_and_one_decay_bounded(backend: ModuleType) -> None:
    shape = SHAPES[1]
    matrices, inputs = make_matrices(3, shape), make_inputs(21, shape, torch.float32)
    inputs = replace(inputs, rate_scale=2.0, lowest=-3.0)
    expected, _ = recurrence(inputs, matrices[1].clone())
    out = backend.gated_delta_rule(inputs, matrices, make_rows([21]))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_of_16_bits_round_the_result_alone(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    inputs = make_inputs(9, shape, dtype)
    matrices, wide = make_matrices(7, shape), make_matrices(7, shape)
    out = gated_delta_rule(inputs, matrices, make_rows([5, 1, 3]))
    as_floats = replace(inputs, mixed=inputs.mixed.float(), decays=inputs.decays.float(), rates=inputs.rates.float())
    expected = gated_delta_rule(as_floats, wide, make_rows([5, 1, 3]))
    assert torch.equal(out, expected.to(dtype))
    assert torch.equal(matrices, wide)


@pytest.mark.parametrize("has_row_decays", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cuts", [[1] * 23, [7, 16], [22, 1], [1, 3, 19]], ids=str)
def test_no_cut_changes_a_bit(
    backend: ModuleType, shape: tuple[int, int, int, int], cuts: list[int], has_row_decays: bool
) -> None:
    inputs = make_inputs(23, shape, torch.float32)
    inputs = with_row_decays(inputs, shape) if has_row_decays else inputs
    check_cuts(backend.gated_delta_rule, tokens, inputs, lambda count: make_matrices(count, shape), cuts)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_does_not_depend_on_its_neighbours(backend: ModuleType, num_threads: int) -> None:
    shape = SHAPES[2]
    inputs = make_inputs(20, shape, torch.float32)
    check_neighbours(backend.gated_delta_rule, tokens, inputs, lambda count: make_matrices(count, shape), num_threads)


def test_drafts_are_answered_and_change_no_block(backend: ModuleType) -> None:
    shape = SHAPES[0]
    inputs = make_inputs(12, shape, torch.float32)
    check_drafts(backend.gated_delta_rule, tokens, inputs, lambda count: make_matrices(count, shape))


def test_what_does_not_fit_is_refused() -> None:
    shape = SHAPES[0]
    inputs, matrices = make_inputs(3, shape, torch.float32), make_matrices(3, shape)
    with pytest.raises(ValueError, match="do not fit matrices"):
        gated_delta_rule(inputs, matrices[:, :, :8], make_rows([3]))
    with pytest.raises(ValueError, match="must be float32"):
        gated_delta_rule(inputs, matrices.bfloat16(), make_rows([3]))
    with pytest.raises(ValueError, match="int64"):
        gated_delta_rule(inputs, matrices, StateRows(*(torch.zeros(n, dtype=torch.int32) for n in (2, 1, 1, 1))))
