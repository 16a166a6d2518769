"""Checks of any operation that reads and writes states: the rows, cuts and drafts of its tokens change no bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from kernel_helpers.states import make_rows
from llmstack_kernels.state_rows import StateRows

Inputs = TypeVar("Inputs")
Scan = Callable[[Inputs, torch.Tensor, StateRows], torch.Tensor]
Tokens = Callable[[Inputs, int, int], Inputs]
MakeStates = Callable[[int], torch.Tensor]


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check_agrees(scan: Scan[Inputs], expected_scan: Scan[Inputs], inputs: Inputs, states: torch.Tensor) -> None:
    """Three rows, 9 tokens and some drafts in all, have the outputs and the states of another backend."""
    rows, expected_states = make_rows([5, 1, 3], [5, 0, 2], device=states.device.type), states.clone()
    expected = expected_scan(inputs, expected_states, rows)
    out = scan(inputs, states, rows)
    assert out.dtype == expected.dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states, expected_states, atol=1e-5, rtol=1e-5)


def check_cuts(
    scan: Scan[Inputs], tokens: Tokens[Inputs], inputs: Inputs, make_states: MakeStates, cuts: Sequence[int]
) -> None:
    """A row computed in pieces has the outputs and the state of the whole row."""
    states = make_states(2 * len(cuts) + 3)
    device = states.device.type
    whole = scan(inputs, states, make_rows([sum(cuts)], device=device))
    expected, start = states[2].clone(), 0
    for block, count in enumerate(cuts, start=1):
        found = scan(tokens(inputs, start, start + count), states, make_rows([count], None, block, device))
        assert torch.equal(found, whole[start : start + count])
        start += count
    assert torch.equal(states[len(cuts) + 1], expected)


def check_neighbours(
    scan: Scan[Inputs], tokens: Tokens[Inputs], inputs: Inputs, make_states: MakeStates, num_threads: int
) -> None:
    """Four rows, 20 tokens in all, have the outputs and the states that each has alone."""
    before, states, alone = torch.get_num_threads(), make_states(9), make_states(9)
    try:
        torch.set_num_threads(num_threads)
        out = scan(inputs, states, make_rows([1, 12, 1, 6]))
    finally:
        torch.set_num_threads(before)
    for row, (start, end) in enumerate([(0, 1), (1, 13), (13, 14), (14, 20)]):
        rows = make_rows([end - start], first_block=1 + 2 * row)
        assert torch.equal(scan(tokens(inputs, start, end), alone, rows), out[start:end])
    assert torch.equal(alone, states)


def check_drafts(scan: Scan[Inputs], tokens: Tokens[Inputs], inputs: Inputs, make_states: MakeStates) -> None:
    """Drafts, behind the known ones of 12 tokens, have outputs and change no state."""
    states, plain = make_states(5), make_states(5)
    before = states.clone()
    out = scan(inputs, states, make_rows([8, 4], known=[5, 0]))
    assert torch.equal(out, scan(inputs, plain, make_rows([8, 4])))
    scan(tokens(inputs, 0, 5), plain, make_rows([5]))
    assert torch.equal(states[2], plain[2])
    assert torch.equal(states[4], before[3])  # none is known, so the state goes on as it was
    assert torch.equal(states[[0, 1, 3]], before[[0, 1, 3]])
