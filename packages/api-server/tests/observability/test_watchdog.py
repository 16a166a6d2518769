"""Requests that get nowhere are named once, and a stuck engine takes the server out of rotation."""

from __future__ import annotations

import logging

import pytest

from llmstack_server.app import build_app
from llmstack_server.observability.watchdog import INTERVAL_S, MAX_NUM_NAMED, StuckWatchdog
from llmstack_server.testing import FakeEngineClient, call, ready_state


class StuckEngine:
    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.is_stuck = False
        self.num_looks = 0

    def find_stuck_requests(self, timeout_s: float) -> tuple[list[str], bool]:
        self.num_looks += 1
        return self.request_ids, self.is_stuck


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def look(watchdog: StuckWatchdog, clock: Clock, engine: StuckEngine) -> None:
    clock.now_s += INTERVAL_S
    watchdog.tick(engine)


def test_a_stuck_request_is_named_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock, engine, counts = Clock(), StuckEngine(), []
    watchdog = StuckWatchdog(60.0, counts.append, clock)
    engine.request_ids = ["cmpl-1-0"]
    with caplog.at_level(logging.WARNING):
        look(watchdog, clock, engine)
        look(watchdog, clock, engine)
        engine.request_ids = []
        look(watchdog, clock, engine)
    assert counts == [1, 1, 0]
    assert [record.getMessage() for record in caplog.records] == ["request cmpl-1-0 is stuck: no progress for 60 s"]
    assert not watchdog.is_engine_stuck


def test_many_are_counted_rather_than_named(caplog: pytest.LogCaptureFixture) -> None:
    clock, engine = Clock(), StuckEngine()
    engine.request_ids = [f"r{number}" for number in range(MAX_NUM_NAMED + 5)]
    with caplog.at_level(logging.WARNING):
        look(StuckWatchdog(1.0, clock=clock), clock, engine)
    assert len(caplog.records) == MAX_NUM_NAMED + 1
    assert caplog.records[-1].getMessage() == "5 more requests are stuck"


def test_it_looks_every_few_seconds_and_not_at_all_where_it_is_off() -> None:
    clock, engine = Clock(), StuckEngine()
    watchdog, off = StuckWatchdog(1.0, clock=clock), StuckWatchdog(0.0, clock=clock)
    for _ in range(10):
        clock.now_s += INTERVAL_S / 5
        watchdog.tick(engine)
        off.tick(engine)
    assert engine.num_looks == 2


async def test_a_stuck_engine_is_not_ready_but_alive() -> None:
    clock, engine = Clock(), StuckEngine()
    state = ready_state(FakeEngineClient())
    state.watchdog = StuckWatchdog(1.0, clock=clock)
    app = build_app(state)
    assert (await call(app, "GET", "/ready")).status == 200
    engine.is_stuck, engine.request_ids = True, ["r"]
    look(state.watchdog, clock, engine)
    answer = await call(app, "GET", "/ready")
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert (await call(app, "GET", "/health")).status == 200
    engine.is_stuck, engine.request_ids = False, []
    look(state.watchdog, clock, engine)
    assert (await call(app, "GET", "/ready")).status == 200
