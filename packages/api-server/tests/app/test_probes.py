"""What probes see in each state of a server: the process, the engine, and whether requests make progress."""

from __future__ import annotations

import pytest

from llmstack_server.app import build_app
from llmstack_server.state.lifecycle import Lifecycle, LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state


def starts(state: ServerState, engine: FakeEngineClient) -> None:
    state.lifecycle = Lifecycle()
    state.lifecycle.advance(LifecycleState.LOADING_MODEL)


def drains(state: ServerState, engine: FakeEngineClient) -> None:
    state.lifecycle.advance(LifecycleState.DRAINING)


def is_replaced(state: ServerState, engine: FakeEngineClient) -> None:
    engine.is_recovering = True


def is_stuck(state: ServerState, engine: FakeEngineClient) -> None:
    state.watchdog.is_engine_stuck = True


def sleeps(state: ServerState, engine: FakeEngineClient) -> None:
    engine.sleep_level = 1


def is_gone(state: ServerState, engine: FakeEngineClient) -> None:
    engine.is_dead = True


@pytest.mark.parametrize(
    ("change", "health", "ready", "status"),
    [
        (starts, 503, 503, "Loading Model"),
        (None, 200, 200, "Ready"),
        (sleeps, 200, 200, "Ready"),
        # A liveness probe that failed would end the server, and with it all requests that recovery saves.
        (is_replaced, 200, 503, "Ready"),
        (is_stuck, 200, 503, "Ready"),
        (drains, 200, 503, "Draining"),
        (is_gone, 503, 503, "Stopped"),
    ],
)
async def test_health_is_the_engine_and_ready_is_progress(change, health, ready, status):
    engine = FakeEngineClient()
    state = ready_state(engine)
    if change is not None:
        change(state, engine)
    app = build_app(state)
    answers = {path: await call(app, "GET", path) for path in ("/ping", "/health", "/ready")}
    assert [answer.status for answer in answers.values()] == [200, health, ready]
    assert answers["/health"].json()["status"] == status
    heads = [(await call(app, "HEAD", path)).status for path in answers]
    assert heads == [200, health, ready]
    if ready == 503:
        assert answers["/ready"].json()["error"]["code"] == "engine_unavailable"
