"""A server spread over processes: the same answers however it is, and nothing left behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_calls import LONG, PROMPTS, complete, complete_all, open_stream, post, rest_of

import llmstack_demo_model


@pytest.fixture(scope="module")
def slow_echo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], list[str]]:
    """Arguments for a model that starts at once and takes the given time per token."""

    def arguments(step_delay_s: float) -> list[str]:
        folder = tmp_path_factory.mktemp("models") / f"echo?step_delay_s={step_delay_s}"
        folder.symlink_to(llmstack_demo_model.model_path())
        return [str(folder), "--runner", "echo", "--served-model-name", "llmstack-demo"]

    return arguments


@pytest.fixture
def start(
    launch: Callable[..., Any], runtime_folder: Path, slow_echo: Callable[[float], list[str]]
) -> Callable[..., Any]:
    """Starts a server that is ready, over the slow echo unless the demo model is asked for."""

    def start_ready(*arguments: str, has_model: bool = False, step_delay_s: float = 0.005) -> Any:
        model = [] if has_model else slow_echo(step_delay_s)
        server = launch(*model, *arguments, env={"XDG_RUNTIME_DIR": str(runtime_folder)})
        server.wait_until_ready()
        return server

    return start_ready


def lose_stream(server: Any, asked: dict[str, Any]) -> tuple[str, str]:
    """The last id and the text of a resumable stream whose connection is closed after some events."""
    text, last_id, num_events = "", "", 0
    body = asked | {"stream": True}
    headers = {"Idempotency-Key": "lost"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                num_events += 1
            if num_events == 4:
                break
    return last_id, text


def rest_of_lost(server: Any, last_id: str) -> str:
    """The text of a stream after the event with this id."""
    stream_id, _, number = last_id.partition(".")
    answer = httpx.get(f"{server.url}/v1/streams/{stream_id}?after={number}", timeout=60)
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def processes(server: Any) -> dict[str, Any]:
    return dict(server.get_json("/server_info")["processes"])


def api_pids(server: Any, count: int = 2) -> list[int]:
    """Process ids of the API processes by index, once all of them have answered."""
    index_to_pid: dict[int, int] = {}

    def have_all_answered() -> bool:
        with ThreadPoolExecutor(8) as pool:
            for info in pool.map(lambda _: processes(server), range(16)):
                index_to_pid[info["api_server_index"]] = info["pid"]
        return len(index_to_pid) == count

    server.wait_for(have_all_answered, "answer of every API process")
    return [index_to_pid[index] for index in range(count)]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--disable-frontend-multiprocessing"], id="one-process", marks=pytest.mark.full),
        pytest.param(["--api-server-count", "2"], id="two-api-processes", marks=pytest.mark.full),
        pytest.param(["--data-parallel-size", "2"], id="two-engines", marks=pytest.mark.full),
        pytest.param(["--api-server-count", "2", "--data-parallel-size", "2"], id="two-of-each"),
    ],
)
def test_every_arrangement_gives_the_same_answers_and_leaves_nothing(
    start: Callable[..., Any], runtime_folder: Path, expected: list[str], arguments: list[str]
) -> None:
    server = start(*arguments, has_model=True)
    assert complete_all(server) == expected
    assert server.log.count("is ready on") == 1
    assert server.stop(timeout_s=20) == 0
    assert list(runtime_folder.iterdir()) == []
    assert "Traceback" not in server.log


def test_one_process_alone_holds_everything(start: Callable[..., Any]) -> None:
    server = start("--disable-frontend-multiprocessing")
    assert psutil.Process(server.process.pid).children() == []
    assert server.get_json("/server_info")["engine"]["pid"] == server.process.pid
    stream = open_stream(server)
    server.process.send_signal(signal.SIGTERM)
    assert rest_of(stream) == "length"
    assert server.process.wait(20) == 0


def test_two_api_processes_share_one_port_one_engine_and_their_metrics(start: Callable[..., Any]) -> None:
    server = start("--api-server-count", "2")
    api_pids(server)
    engine_pid = server.engine_pid()  # there is but one
    complete_all(server)
    for _ in range(6):  # any process may answer
        assert server.metric("llmstack:request_success_total") == len(PROMPTS)
        assert server.metric("vllm:generation_tokens_total") == 12 * len(PROMPTS)
        assert server.metric("llmstack:num_requests_running") == 0
        assert server.metric("llmstack:lifecycle_state") == 1
        assert server.get_json("/server_info")["engine"]["pid"] == engine_pid
    stream = open_stream(server)
    server.wait_for(lambda: server.metric("llmstack:num_requests_running") == 1, "running request, in whoever answers")
    assert {server.get_json("/load")["server_load"] for _ in range(6)} == {1}
    stream.close()
    server.wait_for(lambda: server.metric("llmstack:num_requests_running") == 0, "abort")
    steps = server.metric("llmstack:engine_steps_total")
    assert server.metric("llmstack:iteration_tokens_total_count") <= steps < 2 * 400
    server.stop()


def test_an_api_process_that_is_killed_loses_its_own_requests_and_is_replaced(
    start: Callable[..., Any], runtime_folder: Path
) -> None:
    server = start("--api-server-count", "2")
    pids = api_pids(server)
    streams = [open_stream(server) for _ in range(8)]
    server.wait_for(lambda: server.metric("llmstack:num_requests_running") > 0, "running requests")
    os.kill(pids[0], signal.SIGKILL)
    statuses: list[int] = []

    def is_replaced() -> bool:
        statuses.append(server.get_status("/ready"))
        info = processes(server)
        return bool(info["api_server_index"] == 0 and info["pid"] != pids[0])

    server.wait_for(is_replaced, "replacement")
    assert set(statuses) <= {200, 0}  # 0 is a connection that the killed process had taken
    assert {rest_of(stream) for stream in streams} <= {"length", "lost"}
    assert api_pids(server)[1] == pids[1]
    server.wait_for(lambda: server.metric("llmstack:kv_cache_usage_perc") == 0, "freed blocks")
    assert complete(server, "The", max_tokens=3)
    assert server.stop(timeout_s=20) == 0
    assert list(runtime_folder.iterdir()) == []


def test_a_signal_drains_all_api_processes_and_a_second_one_does_not_wait(
    start: Callable[..., Any], runtime_folder: Path
) -> None:
    server = start("--api-server-count", "2")
    streams = [open_stream(server) for _ in range(4)]
    server.process.send_signal(signal.SIGTERM)
    assert [rest_of(stream) for stream in streams] == ["length"] * 4
    assert server.process.wait(20) == 0
    assert list(runtime_folder.iterdir()) == []

    server = start("--api-server-count", "2", "--shutdown-timeout", "60", step_delay_s=0.1)  # 40 s of stream
    stream = open_stream(server)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: "SIGTERM: shutting down" in server.log, "first signal")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 128 + signal.SIGTERM
    assert rest_of(stream) == "lost"
    assert list(runtime_folder.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--api-server-count", "2"], id="api"),
        pytest.param(["-dp", "2"], id="engines", marks=pytest.mark.full),
    ],
)
def test_a_dead_engine_core_ends_all_with_a_clear_line(
    start: Callable[..., Any], runtime_folder: Path, arguments: list[str]
) -> None:
    server = start(*arguments, "--max-engine-restarts", "0")
    family = psutil.Process(server.process.pid).children(recursive=True)
    stream = open_stream(server)
    os.kill(server.get_json("/server_info")["engines"][-1]["pid"], signal.SIGKILL)
    assert rest_of(stream) == "lost"
    assert server.process.wait(30) == 1
    assert "engine core" in server.log
    assert "Traceback" not in server.log
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert list(runtime_folder.iterdir()) == []


def test_streams_of_all_api_processes_go_on_with_another_engine_core(
    start: Callable[..., Any], runtime_folder: Path
) -> None:
    server = start("--api-server-count", "2")
    first_pid = server.engine_pid()
    asked = {**LONG, "max_tokens": 150, "model": "llmstack-demo", "prompt": "The end"}
    undisturbed = server.client.completions.create(**asked).choices[0].text
    streams = [iter(server.client.completions.create(**asked, stream=True)) for _ in range(6)]
    texts = [next(stream).choices[0].text for stream in streams]
    lost_id, lost_text = lose_stream(server, asked)
    os.kill(first_pid, signal.SIGKILL)
    texts = [text + "".join(chunk.choices[0].text for chunk in rest) for text, rest in zip(texts, streams, strict=True)]
    assert texts == [undisturbed] * 6
    for _ in range(6):  # any API process may answer
        assert lost_text + rest_of_lost(server, lost_id) == undisturbed
    server.wait_for(lambda: server.get_status("/ready") == 200, "recovered server")
    assert server.engine_pid() != first_pid
    assert api_pids(server)
    assert "another one starts" in server.log
    assert "Traceback" not in server.log
    assert server.stop(timeout_s=20) == 0
    assert list(runtime_folder.iterdir()) == []


def test_an_api_process_that_starts_after_an_engine_core_has_ended_for_good_serves_with_the_others(
    start: Callable[..., Any],
) -> None:
    server = start("--api-server-count", "2", "-dp", "2", "--max-engine-restarts", "1")
    pids = api_pids(server)
    kept = server.get_json("/server_info")["engines"][1]["pid"]

    def has_ended_for_good() -> bool:
        for pid in set(server.engine_pids()) - {kept}:
            with contextlib.suppress(ProcessLookupError):  # one of before, which ends just now
                os.kill(pid, signal.SIGKILL)
        return "the others go on" in server.log

    server.wait_for(has_ended_for_good, "end of an engine core")
    os.kill(pids[0], signal.SIGKILL)
    server.wait_for(lambda: api_pids(server)[0] != pids[0], "replaced API process")
    assert len(complete_all(server)) == len(PROMPTS)
    assert server.stop(timeout_s=20) == 0
    assert "Traceback" not in server.log


def test_a_killed_server_takes_all_its_processes_along(start: Callable[..., Any], runtime_folder: Path) -> None:
    server = start("--api-server-count", "2", "-dp", "2")
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert len(family) == 4
    server.process.kill()
    server.process.wait(10)
    assert not psutil.wait_procs(family, timeout=15)[1]
    assert list(runtime_folder.iterdir()) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.3, pytest.param(0.1, marks=pytest.mark.full)])
def test_a_server_that_is_killed_while_it_replaces_its_engine_core_leaves_nothing(
    start: Callable[..., Any], runtime_folder: Path, delay_s: float
) -> None:
    server = start()
    first_pid = server.engine_pid()
    os.kill(first_pid, signal.SIGKILL)
    server.wait_for(lambda: set(server.engine_pids()) - {first_pid}, "another engine core")
    time.sleep(delay_s)  # it imports its modules meanwhile, or loads
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait(10)
    assert not psutil.wait_procs(family, timeout=15)[1]
    assert list(runtime_folder.iterdir()) == []


def test_a_taken_port_fails_before_any_process_starts(launch: Callable[..., Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = launch("--api-server-count", "2", "--port", port)
        assert server.process.wait(20) == 1
    assert f"port {port} on 127.0.0.1 is in use" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("arguments", "exit_code", "part"),
    [
        (["/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["--runner", "nonesuch"], 1, "there is no model runner 'nonesuch'"),
        pytest.param(["--runner", "echo", "--num-kv-blocks", "100000000"], 1, "out of memory", marks=pytest.mark.full),
    ],
)
def test_a_start_that_fails_is_one_line_however_many_processes_there_are(
    launch: Callable[..., Any], runtime_folder: Path, arguments: list[str], exit_code: int, part: str
) -> None:
    server = launch("--api-server-count", "2", *arguments, env={"XDG_RUNTIME_DIR": str(runtime_folder)})
    assert server.process.wait(60) == exit_code
    assert part in server.log.splitlines()[-1]
    assert "Traceback" not in server.log
    assert list(runtime_folder.iterdir()) == []


@pytest.mark.full
def test_an_engine_core_that_is_killed_while_loading_ends_the_start_at_once(
    launch: Callable[..., Any], runtime_folder: Path
) -> None:
    server = launch("--api-server-count", "2", env={"XDG_RUNTIME_DIR": str(runtime_folder)})
    # It listens once it has its order, before it loads; one that is killed earlier has not begun, and is replaced.
    server.wait_for(lambda: list(runtime_folder.glob("*/engine.sock")), "engine core that listens")
    os.kill(engine_pids(server)[0], signal.SIGKILL)
    assert server.process.wait(10) == 1
    assert "engine core 0 has ended: killed by SIGKILL" in server.log.splitlines()[-1]
    assert list(runtime_folder.iterdir()) == []


def engine_pids(server: Any) -> list[int]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child.pid for child in children if "llmstack_engine_core.process" in child.cmdline()]


@pytest.mark.full
def test_api_processes_that_end_again_and_again_end_the_server(start: Callable[..., Any], runtime_folder: Path) -> None:
    server = start("--api-server-count", "2")
    for _ in range(6):
        for child in psutil.Process(server.process.pid).children():
            if "llmstack_server.serving.api_worker" in child.cmdline():
                child.kill()
                child.wait(10)
                break
    assert server.process.wait(20) == 1
    assert "too often: the server stops" in server.log
    assert list(runtime_folder.iterdir()) == []


def test_a_stop_while_loading_leaves_nothing(launch: Callable[..., Any], runtime_folder: Path) -> None:
    server = launch("--api-server-count", "2", env={"XDG_RUNTIME_DIR": str(runtime_folder)})
    server.wait_until_listening()
    assert server.stop(timeout_s=20) == 0
    assert list(runtime_folder.iterdir()) == []


def test_engine_cores_share_the_requests_and_each_has_its_metrics(start: Callable[..., Any]) -> None:
    server = start("-dp", "2", "--enable-control-routes")
    streams = [open_stream(server) for _ in range(4)]
    for engine in ("0", "1"):
        pattern = rf'llmstack:num_requests_running\{{engine="{engine}",model_name="llmstack-demo"\}} (\S+)'
        assert float(re.findall(pattern, httpx.get(f"{server.url}/metrics").text)[0]) == 2
    info = server.get_json("/server_info")
    assert len({engine["pid"] for engine in info["engines"]}) == 2
    for stream in streams:
        stream.close()
    server.wait_for(lambda: server.metric("llmstack:num_requests_running") == 0, "aborts")
    assert post(server, "/reset_prefix_cache") == 200
    server.stop()
