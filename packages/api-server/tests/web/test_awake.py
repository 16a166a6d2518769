"""Requests to an engine that has fallen asleep by itself."""

from __future__ import annotations

import asyncio
import dataclasses

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig, ServeConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state

COMPLETION = {"model": "fake", "prompt": "a", "max_tokens": 2}


class SlowEngine(FakeEngineClient):
    """An engine that wakes once `may_wake` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_wake = asyncio.Event()

    async def wake_up(self) -> None:
        await self.may_wake.wait()
        await super().wake_up()


def idle_state(engine: FakeEngineClient) -> ServerState:
    """The state of a server whose engine sleeps when a second has passed."""
    plain = ready_state(engine, HTTPConfig(enable_control_routes=True))
    processes = ProcessConfig(has_sleep_mode=True, idle_sleep_s=1.0)
    config: ServeConfig = dataclasses.replace(plain.config, processes=processes)
    return ServerState(config, engine, plain.metrics, plain.lifecycle, ready=plain.ready)


async def fall_asleep(state: ServerState) -> None:
    assert state.idle is not None
    state.idle.last_used_s -= 10
    state.idle.tick()
    for _ in range(5):
        await asyncio.sleep(0)
    assert state.engine.sleep_level


async def test_a_request_wakes_the_engine_and_health_and_metrics_say_how_it_is():
    engine = SlowEngine()
    state = idle_state(engine)
    app = build_app(state)
    assert (await call(app, "GET", "/health")).json() == {"status": "Ready", "sleep_level": 0}
    await fall_asleep(state)
    assert (await call(app, "GET", "/health")).json() == {"status": "Ready", "sleep_level": 1}
    assert (await call(app, "GET", "/ready")).status == 200
    metrics = (await call(app, "GET", "/metrics")).body.decode()
    assert 'llmstack:idle_sleeps_total{model_name="fake"} 1.0' in metrics
    assert 'sleep_state="weights_offloaded"} 1.0' in metrics
    paths = ("/v1/completions", "/v1/completions", "/v1/embeddings")
    bodies = (COMPLETION, COMPLETION, {"model": "fake", "input": "a"})
    answers = [asyncio.create_task(call(app, "POST", path, body)) for path, body in zip(paths, bodies, strict=True)]
    await asyncio.sleep(0.02)
    assert not any(answer.done() for answer in answers)
    assert state.in_flight.count == 3  # a drain waits for them
    engine.may_wake.set()
    assert [answer.status for answer in await asyncio.gather(*answers)] == [200] * 3
    assert 'llmstack:idle_wakes_total{model_name="fake"} 1.0' in (await call(app, "GET", "/metrics")).body.decode()


async def test_the_wait_counts_towards_the_deadline():
    engine = SlowEngine()
    state = idle_state(engine)
    app = build_app(state)
    await fall_asleep(state)
    refused = await call(app, "POST", "/v1/completions", COMPLETION, {"x-llmstack-deadline-ms": "20"})
    assert (refused.status, refused.json()["error"]["code"]) == (408, "deadline_exceeded")
    late = asyncio.create_task(call(app, "POST", "/v1/completions", COMPLETION | {"deadline_ms": 20}))
    in_time = asyncio.create_task(call(app, "POST", "/v1/completions", COMPLETION | {"deadline_ms": 60_000}))
    await asyncio.sleep(0.05)
    engine.may_wake.set()
    assert ((await late).status, (await in_time).status) == (408, 200)


async def test_requests_that_wait_end_with_the_server():
    engine = SlowEngine()
    state = idle_state(engine)
    app = build_app(state)
    await fall_asleep(state)
    waiting = asyncio.create_task(call(app, "POST", "/v1/completions", COMPLETION))
    await asyncio.sleep(0.02)
    state.in_flight.cut()
    assert (await waiting).status == 503
    engine.may_wake.set()


async def test_no_request_ends_a_sleep_that_an_operator_asked_for():
    engine = FakeEngineClient()
    state = idle_state(engine)
    app = build_app(state)
    await fall_asleep(state)
    assert (await call(app, "POST", "/sleep?level=2")).status == 200
    refused = await call(app, "POST", "/v1/completions", COMPLETION)
    assert (refused.status, "/wake_up" in refused.json()["error"]["message"]) == (503, True)
    assert engine.sleep_level == 2
    assert (await call(app, "POST", "/wake_up")).status == 200
    assert (await call(app, "POST", "/v1/completions", COMPLETION)).status == 200
    await fall_asleep(state)
    assert (await call(app, "POST", "/wake_up")).status == 200
    assert state.idle is not None
    assert not state.idle.is_asleep


async def test_an_operator_who_puts_it_to_sleep_as_it_wakes_is_obeyed():
    class SleptAgain(FakeEngineClient):
        async def wake_up(self) -> None:
            """Wakes, and is put to sleep before the request that has woken it goes on."""
            self.sleep_level = 2

    engine = SleptAgain()
    state = idle_state(engine)
    app = build_app(state)
    await fall_asleep(state)
    refused = await call(app, "POST", "/v1/completions", COMPLETION)
    assert (refused.status, "/wake_up" in refused.json()["error"]["message"]) == (503, True)
    assert engine.sleep_level == 2


async def test_questions_about_past_requests_do_not_wake_the_engine():
    engine = SlowEngine()
    state = idle_state(engine)
    app = build_app(state)
    await fall_asleep(state)
    for path in ("/v1/requests/none/explanation", "/steps", "/steps/log"):
        await call(app, "GET", path)  # would wait for the wake otherwise
    assert state.engine.sleep_level
    assert state.idle is not None
    assert state.idle.num_wakes == 0
