"""`keep_alive`: how long a model stays awake after a request, and who may shorten it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmstack_server.apis.ollama.keep_alive import MAX_KEEP_S, read_keep_alive
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.process_options import ProcessConfig
from llmstack_server.options.secret import Secret
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state
from llmstack_types import InvalidRequestError


def idle_state(http: HTTPConfig | None = None, after_s: float | None = 600.0) -> ServerState:
    engine = FakeEngineClient()
    plain = ready_state(engine, http)
    config = dataclasses.replace(plain.config, processes=ProcessConfig(idle_sleep_s=after_s))
    return ServerState(config, engine, plain.metrics, plain.lifecycle, ready=plain.ready)


async def left_after(state: ServerState, app: Any, key: str, **fields: Any) -> float:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "fake", "prompt": "a", "stream": False, "options": {"num_predict": 1}, **fields}
    answer = await call(app, "POST", "/api/generate", body, headers)
    assert answer.status == 200, answer.body
    assert state.idle is not None
    left_s = state.idle.seconds_left()
    assert left_s is not None
    return round(left_s, -1)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), (30, 30), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("90", 90), (0, 0), ("0s", 0),
     (10**400, MAX_KEEP_S), (-(10**400), MAX_KEEP_S), (-0.5, MAX_KEEP_S),
     (-1, MAX_KEEP_S), ("-1", MAX_KEEP_S), ("-1m", MAX_KEEP_S), ("1000h", MAX_KEEP_S)],
)  # fmt: skip
def test_times_are_read_as_ollama_reads_them(value: object, seconds: float | None):
    assert read_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["soon", "5 m", "", True, [], {}, "m", "9" * 400, "1s" * 33])
def test_what_is_no_time_is_refused(value: object):
    with pytest.raises(InvalidRequestError):
        read_keep_alive(value)


async def test_the_last_request_says_how_long_the_model_stays_awake():
    state = idle_state()
    app = build_app(state)
    assert await left_after(state, app, "") == 600
    assert await left_after(state, app, "", keep_alive="1h") == 3600
    assert await left_after(state, app, "", keep_alive=-1) == MAX_KEEP_S
    assert await left_after(state, app, "", keep_alive="20s") == 20
    assert await left_after(state, app, "") == 600
    expiry = (await call(app, "GET", "/api/ps")).json()["models"][0]["expires_at"]
    assert not expiry.startswith("9999")
    ended = await call(app, "POST", "/api/generate", {"model": "fake", "prompt": "", "keep_alive": 0})
    assert ended.json()["done_reason"] == "unload"
    assert state.idle is not None
    assert state.idle.seconds_left() == 0
    assert (await call(app, "POST", "/api/chat", {"model": "fake", "keep_alive": "soon"})).status == 400


async def test_a_key_shortens_only_what_it_alone_has_used():
    keys = tuple(map(Secret, ("one", "two", "operator")))
    state = idle_state(HTTPConfig(api_keys=keys, operator_keys=frozenset(keys[2:])))
    app = build_app(state)
    assert await left_after(state, app, "one", keep_alive=10) == 10
    assert await left_after(state, app, "two", keep_alive=10) == 600  # the other key would wait for the next wake
    assert await left_after(state, app, "one", keep_alive=10) == 600
    assert await left_after(state, app, "one", keep_alive="1h") == 3600
    assert await left_after(state, app, "operator", keep_alive=10) == 10
    assert state.idle is not None
    state.idle.last_used_s -= 100
    state.idle.tick()
    for _ in range(5):
        await call(app, "GET", "/health")
    assert state.idle.is_asleep
    assert await left_after(state, app, "two", keep_alive=10) == 10  # it has woken the engine, alone


async def test_without_idle_sleep_it_has_no_effect():
    state = idle_state(after_s=None)
    assert state.idle is None
    app = build_app(state)
    answer = await call(app, "POST", "/api/generate", {"model": "fake", "prompt": "", "keep_alive": 0})
    assert answer.json()["done_reason"] == "load"
