"""Request ids, keys, the gate, health, and what happens to requests whose client leaves."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from server_helpers.waiting import wait_until

from llmstack_llm.options.foreign import AcceptedFlag
from llmstack_llm.options.resolve import Settings
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.http_options import CORSConfig, RateLimits
from llmstack_server.options.secret import Secret
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "Hello", "max_tokens": 50}


def starting_state(engine: FakeEngineClient) -> ServerState:
    state = ready_state(engine)
    state.lifecycle.__init__()  # type: ignore[misc]
    state.lifecycle.advance(LifecycleState.LOADING_MODEL)
    return state


@pytest.mark.parametrize("given", ["me-1", "a" * 128])
async def test_a_sane_request_id_is_echoed(given: str):
    app = build_app(ready_state(FakeEngineClient()))
    for path in ("/health", "/nowhere"):
        assert (await call(app, "GET", path, headers={"x-request-id": given})).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "é"])
async def test_any_other_request_id_is_replaced(given: str):
    app = build_app(ready_state(FakeEngineClient()))
    answer = await call(app, "GET", "/health", headers={"x-request-id": given})
    assert answer.headers["x-request-id"] not in ("", given)


async def test_keys_open_everything_and_health_needs_none():
    state = ready_state(FakeEngineClient(), HTTPConfig(api_keys=(Secret("sk-a"), Secret("sk-b"))))
    app = build_app(state)
    for path in ("/health", "/ready", "/ping"):
        assert (await call(app, "GET", path)).status == 200
    for path in ("/v1/models", "/metrics", "/server_info", "/version", "/openapi.json", "/nowhere", "/health/"):
        answer = await call(app, "GET", path)
        assert (answer.status, answer.json()["error"]["code"]) == (401, "missing_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("sk-a", "sk-b"):
        answer = await call(app, "POST", COMPLETIONS, BODY, {"authorization": f"Bearer {key}"})
        assert answer.status == 200
    answer = await call(app, "POST", COMPLETIONS, b"{", {"authorization": "Bearer sk-c"})
    assert (answer.status, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    for malformed in ("sk-a", "Basic sk-a", "Bearer", "Bearer  "):
        answer = await call(app, "GET", "/v1/models", headers={"authorization": malformed})
        assert answer.json()["error"]["code"] == "missing_api_key"


async def test_metrics_may_be_opened():
    http = HTTPConfig(api_keys=(Secret("k"),), has_open_metrics=True)
    app = build_app(ready_state(FakeEngineClient(), http))
    assert (await call(app, "GET", "/metrics")).status == 200
    assert (await call(app, "GET", "/server_info")).status == 401


async def test_no_key_shows_in_server_info():
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(api_keys=(Secret("sk-secret"),))))
    answer = await call(app, "GET", "/server_info", headers={"authorization": "Bearer sk-secret"})
    assert answer.json()["http"]["num_api_keys"] == 1
    assert b"sk-secret" not in answer.body
    assert "sk-secret" not in repr(Secret("sk-secret"))


async def test_flags_without_effect_show_in_server_info_with_their_reason():
    state = ready_state(FakeEngineClient(), HTTPConfig())
    accepted = AcceptedFlag("--moe-backend", "triton", "command line", "kernels are chosen")
    state.config = dataclasses.replace(state.config, settings=Settings((), accepted=[accepted]))
    answer = await call(build_app(state), "GET", "/server_info")
    assert answer.json()["flags_without_effect"] == [accepted._asdict()]


async def test_while_loading_health_names_the_state_and_requests_may_come_again():
    app = build_app(starting_state(FakeEngineClient()))
    answer = await call(app, "GET", "/health")
    assert (answer.status, answer.json()["status"]) == (503, "Loading Model")
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert (await call(app, "GET", "/ready")).status == 503
    assert (await call(app, "GET", "/ping")).status == 200
    answer = await call(app, "POST", COMPLETIONS, BODY)
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await call(app, "GET", "/v1/models")).json()["data"][0]["id"] == "fake"


async def test_requests_are_answered_before_a_server_of_several_processes_is_healthy():
    state = ready_state(FakeEngineClient())
    state.lifecycle.waits_for_others = True
    app = build_app(state)
    for path in ("/health", "/ready"):
        answer = await call(app, "GET", path)
        assert (answer.status, answer.json()["status"]) == (503, "Initializing Engine")
    assert (await call(app, "POST", COMPLETIONS, BODY)).status == 200
    state.lifecycle.waits_for_others = False
    assert (await call(app, "GET", "/ready")).json()["status"] == "Ready"
    state.lifecycle.waits_for_others = True
    state.lifecycle.advance(LifecycleState.DRAINING)
    assert (await call(app, "GET", "/health")).status == 200


async def test_while_draining_new_requests_are_refused_and_health_stays():
    state = ready_state(FakeEngineClient())
    state.lifecycle.advance(LifecycleState.DRAINING)
    app = build_app(state)
    answer = await call(app, "POST", COMPLETIONS, b"{")
    assert (answer.status, answer.json()["error"]["code"]) == (503, "server_shutting_down")
    assert answer.headers["connection"] == "close"
    assert "retry-after" in answer.headers
    assert (await call(app, "GET", "/health")).status == 200
    assert (await call(app, "GET", "/ready")).status == 503


async def test_a_dead_engine_is_unhealthy():
    engine = FakeEngineClient()
    app = build_app(ready_state(engine))
    assert (await call(app, "GET", "/health")).status == 200
    assert (await call(app, "HEAD", "/health")).status == 200
    engine.is_dead = True
    answer = await call(app, "GET", "/health")
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_client_that_leaves_before_the_first_byte_aborts_its_request(path: str, stream: bool):
    engine = FakeEngineClient(step_delay_s=0.01)
    state = ready_state(engine)
    body = {**BODY, "messages": [{"role": "user", "content": "a"}], "stream": stream, "n": 2}
    engine.step_delay_s = 0.2
    answer = await call(build_app(state), "POST", path, body, disconnect_after_parts=0)
    assert answer.status == 0
    assert len(engine.aborted_request_ids) == 1
    assert (engine.num_running, state.in_flight.count) == (0, 0)
    assert b'status="499"' in state.metrics.render()


async def test_a_client_that_leaves_a_stream_aborts_every_prompt_of_it():
    engine = FakeEngineClient(step_delay_s=0.005)
    state = ready_state(engine)
    body = {**BODY, "prompt": ["ab", "cd", "ef"], "stream": True}
    answer = await call(build_app(state), "POST", COMPLETIONS, body, disconnect_after_parts=4)
    assert 4 <= len(answer.parts) < 20
    assert len(engine.aborted_request_ids) == 3
    assert engine.num_running == 0


async def test_load_counts_what_is_in_flight():
    engine = FakeEngineClient(step_delay_s=0.001)
    app = build_app(ready_state(engine))
    running = asyncio.create_task(call(app, "POST", COMPLETIONS, BODY))
    await wait_until(lambda: engine.num_running)
    assert (await call(app, "GET", "/load")).json() == {"server_load": 1}
    await running
    assert (await call(app, "GET", "/load")).json() == {"server_load": 0}


async def test_a_drain_waits_for_streams_and_can_cut_them():
    engine = FakeEngineClient(step_delay_s=0.005)
    state = ready_state(engine)
    app = build_app(state)
    stream = asyncio.create_task(call(app, "POST", COMPLETIONS, {**BODY, "stream": True}))
    whole = asyncio.create_task(call(app, "POST", COMPLETIONS, BODY))
    await wait_until(lambda: engine.num_running == 2)
    assert not await state.in_flight.wait_until_idle(0.05)
    state.in_flight.cut()
    assert await state.in_flight.wait_until_idle(1)
    events = (await stream).events()
    assert events[-1]["error"]["code"] == "server_shutting_down"
    assert "[DONE]" not in events
    assert (await whole).json()["error"]["code"] == "server_shutting_down"
    assert engine.num_running == 0


async def test_origins_are_allowed_by_flag_only():
    headers = {"origin": "http://page.example"}
    closed = await call(build_app(ready_state(FakeEngineClient())), "GET", "/v1/models", headers=headers)
    assert "access-control-allow-origin" not in closed.headers
    http = HTTPConfig(cors=CORSConfig(("http://page.example",)), api_keys=(Secret("k"),))
    app = build_app(ready_state(FakeEngineClient(), http))
    preflight = {**headers, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = await call(app, "OPTIONS", COMPLETIONS, headers=preflight)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "http://page.example")


async def test_pages_of_allowed_origins_can_read_refusals():
    http = HTTPConfig(cors=CORSConfig(("http://page.example",), allows_credentials=True), api_keys=(Secret("k"),))
    app = build_app(ready_state(FakeEngineClient(), http))
    origin, key = {"origin": "http://page.example"}, {"authorization": "Bearer k"}
    refused = ((origin, COMPLETIONS, 401), (origin | key, "/nowhere", 404), (origin | key, COMPLETIONS, 400))
    for headers, path, status in refused:
        answer = await call(app, "POST", path, {"prompt": 5}, headers)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, "http://page.example")
        assert answer.headers["access-control-allow-credentials"] == "true"
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    other = await call(app, "POST", COMPLETIONS, BODY, {"origin": "http://other.example"} | key)
    assert (other.status, "access-control-allow-origin" in other.headers) == (200, False)


async def test_control_routes_are_absent_without_their_flag():
    assert (await call(build_app(ready_state(FakeEngineClient())), "POST", "/reset_prefix_cache")).status == 404
    app = build_app(ready_state(FakeEngineClient(), HTTPConfig(enable_control_routes=True)))
    assert (await call(app, "POST", "/reset_prefix_cache")).status == 200


async def test_the_openapi_document_names_the_fields_and_the_errors():
    document = (await call(build_app(ready_state(FakeEngineClient())), "GET", "/openapi.json")).json()
    post = document["paths"][COMPLETIONS]["post"]
    assert "temperature" in post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert {"200", "400", "404", "500"} <= set(post["responses"])
    assert "text/event-stream" in post["responses"]["200"]["content"]


async def test_models_lists_every_served_name():
    app = build_app(ready_state(FakeEngineClient(), names=("org/a", "b")))
    models = (await call(app, "GET", "/v1/models")).json()
    assert models["object"] == "list"
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [
        ("org/a", "model", 128),
        ("b", "model", 128),
    ]
    assert (await call(app, "GET", "/v1/models/org/a")).json()["id"] == "org/a"


@pytest.mark.parametrize(
    ("method", "path", "headers", "route", "status"),
    [
        ("POST", COMPLETIONS, {}, COMPLETIONS, 401),
        ("GET", "/v1/models/any/name", {}, "/v1/models/{model:path}", 401),
        ("POST", "/pause", {}, "/pause", 401),
        ("POST", "/v1/responses/resp_1/cancel", {}, "/v1/responses/{response_id}/cancel", 401),
        ("POST", "/nowhere", {"authorization": "Bearer k"}, "unknown", 404),
        ("DELETE", COMPLETIONS, {}, "unknown", 401),
    ],
)
async def test_a_refusal_before_the_route_is_counted_under_it(
    method: str, path: str, headers: dict[str, str], route: str, status: int
) -> None:
    state = ready_state(FakeEngineClient(), HTTPConfig(api_keys=(Secret("k"),), enable_control_routes=True))
    app = build_app(state)
    for _ in range(2):
        assert (await call(app, method, path, BODY, headers)).status == status
    shown = method if method == "POST" or method == "GET" else "other"
    line = f'llmstack:http_requests_total{{method="{shown}",route="{route}",status="{status}"}} 2.0'
    assert line in state.metrics.render([], is_operator=True).decode()


async def test_a_refusal_by_the_limit_of_a_key_is_counted_under_its_route() -> None:
    state = ready_state(FakeEngineClient(), HTTPConfig(rate_limits=RateLimits(max_requests_per_minute=1)))
    app = build_app(state)
    assert [(await call(app, "POST", COMPLETIONS, BODY)).status for _ in range(3)] == [200, 429, 429]
    metrics = state.metrics.render([], is_operator=True).decode()
    assert f'llmstack:http_requests_total{{method="POST",route="{COMPLETIONS}",status="429"}} 2.0' in metrics
    assert 'route="unknown"' not in metrics
