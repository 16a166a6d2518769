"""Starting, draining, stopping and dying: nothing is left behind, and every failure has one clear line."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from server_calls import SLOW


def model_of(server: Any) -> str:
    return str(server.client.models.list().data[0].id)


def open_stream(server: Any) -> Any:
    stream = server.client.completions.create(model=model_of(server), prompt="The", stream=True, **SLOW)
    next(iter(stream))
    return stream


@pytest.mark.parametrize("sig", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_health_is_503_while_loading_then_200_and_a_signal_stops_the_idle_server_leaving_nothing(
    launch: Callable[..., Any], runtime_folder: Path, sig: signal.Signals
) -> None:
    server = launch(env={"XDG_RUNTIME_DIR": str(runtime_folder)})
    server.wait_until_listening()
    statuses = []
    server.wait_for(lambda: statuses.append(server.get_status("/health")) or statuses[-1] == 200, "ready server")
    assert set(statuses) <= {0, 503, 200}
    assert 503 in statuses
    assert server.log.count("is ready on") == 1
    assert server.stop(sig, timeout_s=20) == 0
    assert list(runtime_folder.iterdir()) == []


def test_sigterm_while_loading_exits_cleanly(launch: Callable[..., Any], runtime_folder: Path) -> None:
    server = launch(env={"XDG_RUNTIME_DIR": str(runtime_folder)})
    server.wait_until_listening()
    assert server.stop(signal.SIGTERM, timeout_s=20) in (0, 128 + signal.SIGTERM)
    assert list(runtime_folder.iterdir()) == []


def test_a_taken_port_fails_at_once_and_names_the_flag(launch: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = launch("--port", port)
        assert server.process.wait(20) != 0
    assert port in server.log
    assert "--port" in server.log
    assert "Traceback" not in server.log


def test_draining_finishes_running_streams_and_refuses_new_requests(launch: Callable[..., Any]) -> None:
    server = launch()
    server.wait_until_ready()
    client, model = server.client, model_of(server)
    stream = open_stream(server)
    server.process.send_signal(signal.SIGTERM)
    refused: list[openai.APIStatusError] = []

    def try_until_refused() -> None:
        while not refused:
            try:
                client.completions.create(model=model, prompt="x", max_tokens=1)
            except openai.APIStatusError as error:
                refused.append(error)
            except openai.APIConnectionError:
                return

    thread = threading.Thread(target=try_until_refused)
    thread.start()
    chunks = list(stream)
    thread.join(30)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.process.wait(30) == 0
    for error in refused:
        assert error.status_code == 503
        assert error.code == "server_shutting_down"
        assert "retry-after" in error.response.headers


def test_shutdown_timeout_zero_aborts_running_requests(launch: Callable[..., Any]) -> None:
    server = launch("--shutdown-timeout", "0")
    server.wait_until_ready()
    stream = open_stream(server)
    assert server.stop(signal.SIGTERM, timeout_s=20) == 0
    with pytest.raises(openai.OpenAIError):
        list(stream)


@pytest.mark.full  # test_processes.py has it for two API processes
def test_a_dead_engine_core_ends_the_server_with_a_clear_line(launch: Callable[..., Any], runtime_folder: Path) -> None:
    server = launch("--max-engine-restarts", "0", env={"XDG_RUNTIME_DIR": str(runtime_folder)})
    server.wait_until_ready()
    stream = open_stream(server)
    os.kill(server.engine_pid(), signal.SIGKILL)
    with pytest.raises(openai.APIError):
        list(stream)
    assert server.process.wait(30) != 0
    assert "engine core" in server.log.lower()
    assert list(runtime_folder.iterdir()) == []


def test_a_killed_server_takes_its_engine_core_along(launch: Callable[..., Any], runtime_folder: Path) -> None:
    server = launch(env={"XDG_RUNTIME_DIR": str(runtime_folder)})
    server.wait_until_ready()
    engine = psutil.Process(server.engine_pid())
    server.process.kill()
    server.process.wait(10)
    assert not psutil.wait_procs([engine], timeout=10)[1]
    assert list(runtime_folder.iterdir()) == []


def test_torch_is_loaded_in_the_engine_process_alone(demo_server: Any) -> None:
    def libraries(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in libraries(demo_server.engine_pid())
    assert "libtorch" not in libraries(demo_server.process.pid)


def test_a_client_that_goes_away_frees_its_blocks(demo_server: Any) -> None:
    def num_aborted() -> float:
        return demo_server.metric(r'llmstack:request_success_total\{[^}]*finished_reason="abort"[^}]*\}')

    before = num_aborted()
    open_stream(demo_server).close()
    demo_server.wait_for(lambda: num_aborted() == before + 1, "abort")
    demo_server.wait_for(lambda: demo_server.metric("llmstack:num_requests_running") == 0, "end of the request")
    demo_server.wait_for(lambda: demo_server.metric("llmstack:kv_cache_usage_perc") == 0, "freed blocks")


def test_a_missing_model_is_one_line(launch: Callable[..., Any], tmp_path: Path) -> None:
    for name in (str(tmp_path / "absent"), "no-such-organisation/no-such-model"):
        started = time.monotonic()
        server = launch(name, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
        assert server.process.wait(60) != 0
        assert "Traceback" not in server.log, f"after {time.monotonic() - started:.1f} s"
        assert name in server.log


def test_the_positional_model_wins_with_one_warning(launch: Callable[..., Any], tmp_path: Path) -> None:
    server = launch(str(tmp_path / "a"), "--model", str(tmp_path / "b"))
    assert server.process.wait(60) != 0
    assert "ignored" in server.log
    assert str(tmp_path / "a") in server.log
