"""The states of a server: every step of the table, and no other."""

from __future__ import annotations

import itertools

import pytest

from llmstack_server.state.lifecycle import Lifecycle, LifecycleError, LifecycleState

FORWARD = [
    LifecycleState.LOADING_MODEL,
    LifecycleState.INITIALIZING_ENGINE,
    LifecycleState.READY,
    LifecycleState.DRAINING,
    LifecycleState.STOPPED,
]


def test_a_server_goes_through_all_states_and_notes_when():
    ticks = itertools.count()
    lifecycle = Lifecycle(clock=lambda: float(next(ticks)))
    for state in FORWARD:
        lifecycle.advance(state)
    assert list(lifecycle.state_to_entered_s.values()) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    lifecycle.advance(LifecycleState.STOPPED)
    assert lifecycle.is_stopping


@pytest.mark.parametrize("num_steps", range(5))
def test_it_may_stop_from_every_state(num_steps: int):
    lifecycle = Lifecycle()
    for state in FORWARD[:num_steps]:
        lifecycle.advance(state)
    lifecycle.advance(LifecycleState.STOPPED)
    with pytest.raises(LifecycleError):
        lifecycle.advance(LifecycleState.READY)


def test_it_never_goes_back_and_never_skips():
    lifecycle = Lifecycle()
    with pytest.raises(LifecycleError):
        lifecycle.advance(LifecycleState.READY)
    lifecycle.advance(LifecycleState.LOADING_MODEL)
    with pytest.raises(LifecycleError):
        lifecycle.advance(LifecycleState.LOADING_MODEL)
    assert not lifecycle.is_ready
