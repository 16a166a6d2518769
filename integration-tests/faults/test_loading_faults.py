"""What may happen while one of several models is loaded: damaged files, killed processes, clients that leave."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from other_weights import write_checkpoints
from server_calls import LONG

PAUSES_S = (5.5, 10.5, 20.5)
"""After each failure the next try is allowed later."""


@pytest.fixture
def server(launch: Callable[..., Any], tmp_path: Path) -> Any:
    write_checkpoints(tmp_path)
    file = tmp_path / "models.yaml"
    file.write_text(
        "memory: 2G\nloads_per_minute: 1000\nmodels:\n"
        f"  first: {{model: {tmp_path / 'first'}, memory: 500M}}\n"
        f"  next: {{model: {tmp_path / 'next'}, memory: 500M}}\n"
    )
    file.chmod(0o600)
    server = launch("--models", str(file), env={"LLMSTACK_MODEL": ""})
    server.wait_until_ready()
    return server


def complete(server: Any, model: str) -> tuple[int, Any]:
    status, body, _ = server.post("/v1/completions", {"model": model, "prompt": "The", "max_tokens": 4})
    return status, body


def ask(server: Any) -> socket.socket:
    """A connection that has asked the model `next`, and has read nothing."""
    body = b'{"model": "next", "prompt": "x", "max_tokens": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


def status_of(server: Any, name: str) -> str:
    return str(server.get_json(f"/v1/models/{name}")["status"]["value"])


def test_an_engine_core_killed_while_it_loads_costs_its_own_requests_alone(server: Any) -> None:
    assert complete(server, "first")[0] == 200
    known = set(server.engine_pids())
    for num_failures in range(1, 4):
        stream = server.client.completions.create(model="first", prompt="The", stream=True, **LONG)
        next(iter(stream))
        with ask(server) as asking:
            [pid] = server.wait_for(lambda: set(server.engine_pids()) - known, "engine core that loads")
            os.kill(pid, signal.SIGKILL)
            assert b" 503 " in asking.recv(4096)
        assert status_of(server, "next") == "failed"
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert status_of(server, "first") == "loaded"
        assert server.metric(r'llmstack:model_load_failures_total\{model_name="next"\}') == num_failures
        time.sleep(PAUSES_S[num_failures - 1])
    assert complete(server, "next")[0] == 200
    assert server.stop() == 0


def test_damaged_weights_fail_and_are_loaded_once_they_are_whole(server: Any, tmp_path: Path) -> None:
    assert complete(server, "first")[0] == 200
    (weights,) = (tmp_path / "next").glob("*.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    status, body = complete(server, "next")
    assert (status, body["error"]["code"], status_of(server, "next")) == (503, "engine_unavailable", "failed")
    assert complete(server, "first")[0] == 200
    weights.write_bytes(whole)
    assert complete(server, "next")[0] == 503  # at once: the pause is not over
    server.wait_for(lambda: complete(server, "next")[0] == 200, "load after the pause")
    assert server.stop() == 0


def test_clients_that_leave_while_their_model_loads_leave_nothing_behind(server: Any) -> None:
    for _ in range(50):
        with ask(server):
            time.sleep(0.01)
    server.wait_for(lambda: server.metric("llmstack:model_waiting_requests") == 0, "end of the waiting requests")
    server.wait_for(lambda: status_of(server, "next") in ("loaded", "unloaded"), "end of the load")
    assert complete(server, "next")[0] == 200
    server.wait_for(lambda: server.get_json("/load") == {"server_load": 0}, "end of the last request")
    assert server.stop() == 0
