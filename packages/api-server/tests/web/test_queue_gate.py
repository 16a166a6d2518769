"""Requests are refused by their predicted wait, before they are read; a client's deadline ends them later."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from server_helpers.waiting import wait_until

from llmstack_llm.outputs.stats import IterationStats
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret, tenant_ids
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_server.web.first_token_check import JITTER
from llmstack_types import SchedulerStats, ServerOverloadedError

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Hello", "max_tokens": 2}
RATE = 100
NOW_S = 1000.0


def report(state: ServerState, wait_s: float) -> None:
    """Engine core reports: it admits `RATE` tokens per second, and so much is waiting."""
    state.queue = QueueMonitor(clock=lambda: NOW_S)
    num_waiting = int(wait_s * RATE)
    for step in range(11):
        stats = SchedulerStats(num_waiting_tokens=num_waiting or step < 10, num_admitted_tokens=RATE * step)
        state.queue.record(stats, IterationStats(timestamp_s=NOW_S - 10 + step))


def waiting_server(wait_s: float, engine: FakeEngineClient | None = None, **options: Any) -> tuple[Any, ServerState]:
    state = ready_state(engine or FakeEngineClient(), HTTPConfig(**options))
    report(state, wait_s)
    return build_app(state), state


async def post(app: Any, body: Any = BODY, *, path: str = COMPLETIONS, **headers: str) -> Any:
    return await call(app, "POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})


def retry_ms(headers: Mapping[str, str]) -> int:
    assert int(headers["retry-after"]) == -(-int(headers["retry-after-ms"]) // 1000)
    return int(headers["retry-after-ms"])


async def test_a_wait_beyond_the_limit_is_refused_with_when_to_retry():
    app, state = waiting_server(100.0)
    waits = []
    for _ in range(20):
        answer = await post(app)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert "beyond the server's limit of 10 seconds" in answer.json()["error"]["message"]
        waits.append(retry_ms(answer.headers))
    assert all(100_000 * (1 - JITTER) <= wait <= 100_000 * (1 + JITTER) + 1 for wait in waits)
    assert max(waits) > min(waits)
    assert not state.engine.admitted
    assert b'reason="max_queue_wait"} 20.0' in state.metrics.render()


async def test_a_wait_below_the_limit_is_accepted_and_said():
    app, _ = waiting_server(7.0)
    answer = await post(app)
    assert answer.status == 200
    assert answer.headers["x-llmstack-predicted-wait-ms"] == "7000"


async def test_an_unmeasured_server_refuses_nothing_and_predicts_nothing():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(max_queue_wait_s=0.001)))
    answer = await post(app, x_llmstack_deadline_ms="30000")
    assert answer.status == 200
    assert "x-llmstack-predicted-wait-ms" not in answer.headers


async def test_without_a_limit_only_deadlines_refuse():
    app, _ = waiting_server(100.0, max_queue_wait_s=None)
    assert (await post(app)).status == 200
    assert (await post(app, x_llmstack_deadline_ms="50000")).status == 503


async def test_a_deadline_that_cannot_be_reached_is_refused_with_the_predicted_wait():
    app, state = waiting_server(7.0)
    answer = await post(app, x_llmstack_deadline_ms="4000")
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["code"]) == (503, "service_unavailable_error", "deadline_unreachable")
    assert error["message"].startswith("The predicted wait of ")
    assert error["message"].endswith("beyond the request's deadline of 4 seconds.")
    assert 7_000 * (1 - JITTER) <= retry_ms(answer.headers) <= 7_000 * (1 + JITTER) + 1
    assert b'reason="deadline"} 1.0' in state.metrics.render()
    assert (await post(app, x_llmstack_deadline_ms="60000")).status == 200


async def test_a_malformed_deadline_is_named():
    app, _ = waiting_server(0.0)
    for text in ("0", "-1", "1.5", "soon", "", "1234567890", "١"):
        headers = {"x-llmstack-deadline-ms": text.encode().decode("latin-1")}
        answer = await call(app, "POST", COMPLETIONS, BODY, headers)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "x-llmstack-deadline-ms"), text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_that_passes_later_ends_with_408_which_no_client_retries(is_stream):
    engine = FakeEngineClient()
    engine.step_delay_s = 60.0
    app, _ = waiting_server(0.0, engine)
    answer = await post(app, {**BODY, "stream": is_stream}, x_llmstack_deadline_ms="50")
    error = answer.json()["error"]
    assert (answer.status, error["type"], error["code"]) == (408, "server_error", "deadline_exceeded")
    assert error["message"] == "The request was not done within its deadline of 0.05 seconds."
    assert answer.headers["x-should-retry"] == "false"
    assert len(engine.aborted_request_ids) == 1


@pytest.mark.parametrize("value", [0, -1, 1_000_000_000, "soon", 1.5])
async def test_a_deadline_of_the_body_is_checked(value):
    app, _ = waiting_server(0.0)
    answer = await post(app, {**BODY, "deadline_ms": value})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "deadline_ms")


async def test_the_earlier_deadline_of_header_and_body_ends_this_request_and_no_other():
    engine = FakeEngineClient()
    engine.step_delay_s = 60.0
    app, _ = waiting_server(0.0, engine, request_timeout_s=0.2)
    for in_body, in_header in ((50, "60000"), (60_000, "50")):
        answer = await post(app, {**BODY, "deadline_ms": in_body}, x_llmstack_deadline_ms=in_header)
        assert answer.status == 408
    assert (await post(app)).status == 504


async def test_the_earlier_of_both_deadlines_counts():
    engine = FakeEngineClient()
    engine.step_delay_s = 60.0
    app, _ = waiting_server(0.0, engine, request_timeout_s=0.05)
    assert (await post(app, x_llmstack_deadline_ms="60000")).status == 504
    app, _ = waiting_server(0.0, engine, request_timeout_s=60.0)
    assert (await post(app, x_llmstack_deadline_ms="50")).status == 408


async def test_a_vector_has_a_deadline_too():
    engine = FakeEngineClient()
    engine.step_delay_s = 60.0
    app, _ = waiting_server(0.0, engine)
    answer = await post(app, {"input": "Hello"}, path="/v1/embeddings", x_llmstack_deadline_ms="50")
    assert answer.status == 408


async def test_the_key_and_the_shutdown_are_checked_before_the_wait_and_the_body_after_it():
    app, state = waiting_server(100.0, api_keys=(Secret("a"),))
    assert (await post(app)).status == 401
    answer = await post(app, b"{", authorization="Bearer a")
    assert answer.json()["error"]["code"] == "server_is_overloaded"
    state.lifecycle.advance(LifecycleState.DRAINING)
    answer = await post(app, authorization="Bearer a")
    assert answer.json()["error"]["code"] == "server_shutting_down"


async def test_a_full_queue_says_the_predicted_wait_where_it_is_known(monkeypatch):
    engine = FakeEngineClient()

    async def refuse(*requests: Any) -> Any:
        raise ServerOverloadedError("full")

    monkeypatch.setattr(engine, "submit", refuse)
    answer = await post(build_app(ready_state(engine)))
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    app, _ = waiting_server(20.0, engine)
    answer = await post(app)
    assert (answer.status, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert 20_000 * (1 - JITTER) <= retry_ms(answer.headers) <= 20_000 * (1 + JITTER) + 1


async def test_requests_that_were_accepted_a_moment_ago_count():
    """A burst between two reports does not pass as a whole."""
    engine = FakeEngineClient()
    engine.step_delay_s = 60.0
    app, state = waiting_server(0.5, engine, max_queue_wait_s=20.0)
    calls = [asyncio.create_task(post(app)) for _ in range(100)]
    try:
        await wait_until(lambda: sum(one.done() for one in calls) + state.in_flight.count == len(calls))
        assert 2 < state.in_flight.count < 50
        refused = [one.result().status for one in calls if one.done()]
        assert set(refused) == {503}
    finally:
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert state.queue.state().num_waiting_tokens == 50


async def test_the_metrics_show_the_predicted_wait():
    app, _ = waiting_server(20.0)
    text = (await call(app, "GET", "/metrics")).body.decode()
    line = next(line for line in text.splitlines() if line.startswith("llmstack:predicted_queue_wait_seconds{"))
    assert float(line.rpartition(" ")[2]) == pytest.approx(20.0)
    assert "llmstack:queue_drain_tokens_per_second{" in text


async def test_the_engine_gets_an_opaque_id_of_each_key(monkeypatch):
    engine, tenants = FakeEngineClient(), list[str]()
    submit, encode = engine.submit, engine.encode

    def note_submit(*requests: Any) -> Any:
        tenants.extend(request.tenant for request in requests)
        return submit(*requests)

    def note_encode(*arguments: Any, tenant: str, **named: Any) -> Any:
        tenants.append(tenant)
        return encode(*arguments, tenant=tenant, **named)

    monkeypatch.setattr(engine, "submit", note_submit)
    monkeypatch.setattr(engine, "encode", note_encode)
    keys = ("first-key", "second-key")
    app, _ = waiting_server(0.0, engine, api_keys=tuple(Secret(key) for key in keys))
    messages = [{"role": "user", "content": "Hi"}]
    for key in keys:
        authorization = f"Bearer {key}"
        await post(app, authorization=authorization)
        await post(app, {"messages": messages}, path="/v1/chat/completions", authorization=authorization)
        await post(app, {"input": "Hi"}, path="/v1/responses", authorization=authorization)
        await post(app, {"input": "Hi"}, path="/v1/embeddings", authorization=authorization)
        await post(
            app, {"messages": messages, "max_tokens": 3, "model": "fake"}, path="/v1/messages", x_api_key=key
        )  # fmt: skip
    first, second = tenants[:5], tenants[5:]
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
    assert not any(key in tenant for key in keys for tenant in tenants)


async def test_a_key_with_a_long_queue_is_refused_beside_one_that_is_not():
    keys = ("heavy", "light")
    state = ready_state(FakeEngineClient(), HTTPConfig(api_keys=tuple(map(Secret, keys))))
    state.queue = QueueMonitor(4, quantum=100, clock=lambda: NOW_S)
    heavy, _ = tenant_ids(state.config.http.api_keys, state.config.deployment_secret)
    num_waiting = 100 * RATE
    for step in range(11):
        stats = SchedulerStats(
            num_waiting_tokens=num_waiting, num_admitted_tokens=RATE * step, waiting_tenants=(heavy,),
            num_waiting_tokens_per_tenant=(num_waiting,),
        )  # fmt: skip
        state.queue.record(stats, IterationStats(timestamp_s=NOW_S - 10 + step))
    app = build_app(state)
    assert [(await post(app, authorization=f"Bearer {key}")).status for key in keys] == [503, 200]


def test_processes_with_the_same_secret_agree_on_tenants_whatever_their_order():
    a, b = tenant_ids([Secret("a"), Secret("b")], b"secret")
    assert tenant_ids([Secret("b"), Secret("a")], b"secret") == (b, a)
    assert tenant_ids([Secret("a")], b"another") != (a,)
    assert tenant_ids([], b"secret") == ()
