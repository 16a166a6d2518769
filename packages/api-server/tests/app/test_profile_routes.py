"""Profiles over HTTP: where the routes are, and what they answer."""

from __future__ import annotations

import dataclasses

import pytest

from llmstack_llm import EngineArgs
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import FakeEngineClient, call, ready_state


def make_app(engine: FakeEngineClient, *, has_control_routes: bool = True, has_profiler: bool = True):
    state = ready_state(engine, HTTPConfig(enable_control_routes=has_control_routes))
    profiler = {"torch_profiler_dir": "traces"} if has_profiler else None
    state.config = dataclasses.replace(state.config, engine=EngineArgs("fake", profiler_config=profiler))
    return build_app(state)


async def test_a_profile_is_started_once_and_its_traces_are_named():
    app = make_app(FakeEngineClient())
    assert (await call(app, "POST", "/start_profile")).json() == {"status": "started"}
    refused = await call(app, "POST", "/start_profile")
    assert (refused.status, refused.json()["error"]["message"]) == (503, "A profile is being recorded already.")
    stopped = await call(app, "POST", "/stop_profile")
    assert stopped.json() == {"status": "stopped", "traces": ["fake.pt.trace.json"]}
    assert (await call(app, "POST", "/stop_profile")).json() == {"status": "stopped", "traces": []}


@pytest.mark.parametrize(("has_control_routes", "has_profiler"), [(False, True), (True, False)])
async def test_the_routes_are_closed_unless_both_are_asked_for(has_control_routes: bool, has_profiler: bool):
    app = make_app(FakeEngineClient(), has_control_routes=has_control_routes, has_profiler=has_profiler)
    for path in ("/start_profile", "/stop_profile"):
        assert (await call(app, "POST", path)).status == 404
