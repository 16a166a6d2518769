"""Several models in one server: loading, sleep, eviction, keys, and a crash that touches no other model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from other_weights import write_checkpoints
from server_calls import LONG, PROMPTS

NO_MODEL = {"LLMSTACK_MODEL": ""}
LIMIT_MIB = 1100  # two models fit, and a third one does not


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several")
    write_checkpoints(path)
    return path


@pytest.fixture
def serve_models(launch: Callable[..., Any], folder: Path, tmp_path: Path) -> Callable[..., Any]:
    def start(*arguments: str, first: str = "", second: str = "") -> Any:
        file = tmp_path / "models.yaml"
        file.write_text(
            f"memory: {LIMIT_MIB}M\nmodels:\n"
            f"  first:\n    model: {folder / 'first'}\n    memory: 500M\n    aliases: [known]\n{first}"
            f"  second:\n    model: {folder / 'next'}\n    memory: 500M\n{second}"
            f"  third:\n    model: {folder / 'next'}\n    memory: 500M\n    flags: {{max_model_len: 256}}\n"
        )
        file.chmod(0o600)
        server = launch("--models", str(file), *arguments, env=NO_MODEL)
        server.wait_until_ready()
        return server

    return start


def complete(server: Any, model: str, prompt: str = "The", **fields: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    status, answer, _ = server.post("/v1/completions", body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]


def statuses(server: Any) -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in server.get_json("/v1/models")["data"]}


def pids(server: Any, name: str) -> list[int]:
    models = server.get_json("/server_info")["models"]
    return next(list(model["pids"]) for model in models if model["name"] == name)


def test_models_are_loaded_by_their_requests_and_answer_as_alone(serve_models: Callable[..., Any], expected: list[str]):
    server = serve_models()
    assert set(statuses(server).values()) == {"unloaded"}
    assert not server.engine_pids()
    assert [complete(server, "first", prompt)[1] for prompt in PROMPTS] == expected
    assert statuses(server) == {"first": "loaded", "known": "loaded", "second": "unloaded", "third": "unloaded"}
    other = [complete(server, "second", prompt)[1] for prompt in PROMPTS]
    assert other != expected
    assert complete(server, "known")[1] == expected[0]
    assert [model["name"] for model in server.get_json("/api/ps")["models"]] == ["first", "known", "second"]
    assert complete(server, "fourth")[1]["code"] == "model_not_found"
    assert len(server.engine_pids()) == 2
    # Both were loaded less than a minute ago: the third one waits, within its deadline.
    status, error = complete(server, "third", deadline_ms=1500)
    assert (status, error["code"]) == (408, "deadline_exceeded")
    assert server.metric(r'llmstack:model_loads_total\{model_name="second"\}') == 1
    assert server.stop() == 0


def test_a_killed_engine_core_touches_no_other_model(serve_models: Callable[..., Any]):
    server = serve_models(second="    flags: {max_engine_restarts: 0}\n")
    before = complete(server, "second")[1]
    stream = server.client.completions.create(model="first", prompt="The", stream=True, **LONG)
    next(iter(stream))
    [pid] = pids(server, "second")
    os.kill(pid, signal.SIGKILL)
    server.wait_for(lambda: statuses(server)["second"] == "failed", "failure")
    assert complete(server, "second")[0] == 503
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert statuses(server)["first"] == "loaded"
    assert server.get_status("/health") == 200
    server.wait_for(lambda: complete(server, "second")[1] == before, "second load")  # after a pause
    assert server.metric(r'llmstack:model_load_failures_total\{model_name="second"\}') == 1
    [pid] = pids(server, "first")  # this one may be restarted, as in a server of its own
    os.kill(pid, signal.SIGKILL)
    server.wait_for(lambda: complete(server, "first")[0] == 200, "restart")
    assert complete(server, "second")[1] == before
    assert server.stop() == 0


def test_an_idle_model_sleeps_and_wakes_for_its_next_request(serve_models: Callable[..., Any], expected: list[str]):
    server = serve_models(first="    idle_sleep: 1s\n    sleep_level: 2\n")
    for _ in range(2):
        assert complete(server, "first")[1] == expected[0]
        server.wait_for(lambda: statuses(server)["first"] == "sleeping", "sleep")
    name = r'llmstack:model_memory_bytes\{model_name="first"\}'
    server.wait_for(lambda: server.metric(name) < 500 << 20, "memory that others may use")
    assert complete(server, "third")[0] == 200
    assert server.stop() == 0


def test_a_key_uses_its_models_alone_and_a_running_stream_is_drained(
    serve_models: Callable[..., Any], tmp_path: Path, expected: list[str]
):
    keys = tmp_path / "keys"
    keys.write_text("sesame\nlimited models=first\n")
    server = serve_models("--api-key-file", str(keys))
    with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": "Bearer limited"}) as client:
        body = {"model": "first", "prompt": "The", "max_tokens": 12, "temperature": 0}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected[0]
        refused = client.post("/v1/completions", json={**body, "model": "second"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert {one["id"] for one in client.get("/v1/models").json()["data"]} == {"first", "known"}
        more = {"max_tokens": 300, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json={**body, **more}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(timeout=60) == 0  # a second signal would cut the drain short


@pytest.mark.parametrize(
    ("flags", "memory", "said"),
    [
        ("{}", "100M", "its memory of 100 MiB is too little"),
        ("{kv_cache_memory_bytes: 1G}", "500M", "its memory of 500 MiB is too little"),
    ],
)
def test_a_model_that_can_never_run_is_refused_at_the_start(
    launch: Callable[..., Any], folder: Path, tmp_path: Path, flags: str, memory: str, said: str
):
    file = tmp_path / "models.yaml"
    file.write_text(f"memory: 1G\nmodels:\n  one: {{model: {folder / 'first'}, memory: {memory}, flags: {flags}}}\n")
    server = launch("--models", str(file), env=NO_MODEL)
    assert server.process.wait(60) == 2
    assert f"model one: {said}" in server.log


@pytest.mark.full
def test_the_model_unused_for_longest_makes_room_after_a_minute(serve_models: Callable[..., Any], expected: list[str]):
    server = serve_models()
    for name in ("first", "second"):
        assert complete(server, name)[0] == 200
    [pid] = pids(server, "first")
    began_s = time.monotonic()
    assert complete(server, "third", deadline_ms=100_000)[0] == 200  # it waits for the first one's minute
    assert time.monotonic() - began_s > 45
    assert statuses(server) == {"first": "unloaded", "known": "unloaded", "second": "loaded", "third": "loaded"}
    assert not psutil.pid_exists(pid)
    assert complete(server, "first", deadline_ms=100_000)[1] == expected[0]
    assert server.metric(r'llmstack:model_evictions_total\{model_name="second"\}') == 1
    assert server.stop() == 0
