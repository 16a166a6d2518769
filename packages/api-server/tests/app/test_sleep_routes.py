"""Sleep over HTTP: who may ask for it, what is refused meanwhile, and what goes on."""

from __future__ import annotations

import dataclasses

import pytest

from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state

COMPLETION = {"model": "fake", "prompt": "a", "max_tokens": 2}


def make_app(engine: FakeEngineClient, *, has_control_routes: bool = True, has_sleep_mode: bool = True):
    state = ready_state(engine, HTTPConfig(enable_control_routes=has_control_routes))
    state.config = dataclasses.replace(state.config, processes=ProcessConfig(has_sleep_mode=has_sleep_mode))
    return build_app(state)


async def test_an_engine_sleeps_refuses_and_wakes():
    engine = FakeEngineClient()
    app = make_app(engine)
    assert (await call(app, "GET", "/is_sleeping")).json() == {"is_sleeping": False}
    assert (await call(app, "POST", "/sleep")).status == 200
    assert engine.sleep_level == 1
    assert (await call(app, "GET", "/is_sleeping")).json() == {"is_sleeping": True}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages"):
        refused = await call(app, "POST", path, COMPLETION)
        assert refused.status == 503
        assert "/wake_up" in refused.json()["error"]["message"]
    for path in ("/health", "/ready", "/metrics", "/v1/models", "/server_info"):
        assert (await call(app, "GET", path)).status == 200
    assert (await call(app, "GET", "/v1/completions")).status == 405  # path and method come first in every state
    assert (await call(app, "POST", "/v1/nothing")).status == 404
    assert (await call(app, "POST", "/tokenize", {"model": "fake", "prompt": "a"})).status == 200
    metrics = (await call(app, "GET", "/metrics")).body.decode()
    assert 'llmstack:engine_sleep_state{engine="0",model_name="fake",sleep_state="weights_offloaded"} 1.0' in metrics
    assert (await call(app, "POST", "/wake_up")).status == 200
    assert engine.sleep_level == 0
    assert (await call(app, "POST", "/v1/completions", COMPLETION)).status == 200


@pytest.mark.parametrize(
    ("level", "tags", "status", "level_after"),
    [
        (1, "weights", 200, 1),  # they were never freed
        (1, "kv_cache", 200, 0),
        (1, "weights&tags=kv_cache", 200, 0),
        (2, "weights", 400, 2),
        (2, "kv_cache", 400, 2),
        (2, "weights&tags=kv_cache", 200, 0),
        (1, "graphs", 400, 1),
    ],
)
async def test_an_engine_wakes_by_parts(level: int, tags: str, status: int, level_after: int):
    engine = FakeEngineClient()
    engine.sleep_level = level
    app = make_app(engine)
    assert (await call(app, "POST", f"/wake_up?tags={tags}")).status == status
    assert engine.sleep_level == level_after


async def test_an_engine_with_running_requests_does_not_sleep():
    engine = FakeEngineClient()
    engine.num_running = 1
    refused = await call(make_app(engine), "POST", "/sleep")
    assert (refused.status, engine.sleep_level) == (503, 0)
    assert "requests are running" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("has_control_routes", "has_sleep_mode"), [(False, True), (True, False), (False, False)])
async def test_the_routes_are_closed_unless_both_are_asked_for(has_control_routes: bool, has_sleep_mode: bool):
    app = make_app(FakeEngineClient(), has_control_routes=has_control_routes, has_sleep_mode=has_sleep_mode)
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert (await call(app, method, path)).status == 404
