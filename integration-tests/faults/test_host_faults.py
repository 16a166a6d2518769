"""What a host does to a server: few descriptors, full disks, clocks that jump, processes that freeze."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

Start = Callable[..., tuple[Any, Any]]

JUMP_S = 10 * 365 * 86_400


def complete(target: Any, max_tokens: int = 20, **options: Any) -> str:
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.completions.create(
            model="model", prompt="abc def", max_tokens=max_tokens, temperature=0, **options
        )
        return str(answer.choices[0].text)


def stream_text(target: Any, meanwhile: Callable[[], None]) -> str:
    """The text of a stream of a second, of which something happens in the middle."""
    text = ""
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = client.completions.create(
            model="model", prompt="abc def", max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        for number, chunk in enumerate(stream):
            text += chunk.choices[0].text
            if number == 20:
                meanwhile()
    return text


def test_few_descriptors_refuse_connections_until_some_are_closed(start_target: Start) -> None:
    target, server = start_target()
    limit = target.process.num_fds() + 20
    resource.prlimit(target.process.pid, resource.RLIMIT_NOFILE, (limit, limit))
    with ExitStack() as stack:
        for _ in range(60):  # more than the limit allows; the backlog of the socket takes the rest
            stack.enter_context(socket.create_connection(target.address, timeout=60))
        time.sleep(1.0)
        assert target.process.is_running()
    server.wait_for(lambda: server.get_status("/health") == 200, "answer after the flood")
    assert complete(target)
    assert server.stop() == 0


def test_a_full_disk_ends_the_step_log_and_nothing_else(start_target: Start) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    target, server = start_target("--record-steps", "/dev/full")
    first = complete(target, 200)
    assert complete(target, 200) == first
    assert server.stop() == 0
    assert "No space left on device" in server.log
    assert "Traceback" not in server.log


def test_files_that_may_not_grow_end_the_step_log_and_nothing_else(start_target: Start, tmp_path: Path) -> None:
    target, server = start_target("--record-steps", str(tmp_path / "steps"))
    for process in target.family():
        if process.pid != target.process.pid:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    texts = {complete(target, 200, seed=index) for index in range(40)}
    assert len(texts) == 1
    assert server.stop() == 0
    assert "File too large" in server.log


def test_a_clock_that_jumps_ten_years_changes_nothing(start_target: Start, tmp_path: Path) -> None:
    flag = tmp_path / "jump"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "now, now_ns = time.time, time.time_ns\n"
        f"jump = lambda: {JUMP_S} * os.path.exists({str(flag)!r})\n"
        "time.time = lambda: now() + jump()\n"
        "time.time_ns = lambda: now_ns() + jump() * 10**9\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    target, server = start_target(env={"PYTHONPATH": path})
    undisturbed = stream_text(target, lambda: None)
    assert stream_text(target, flag.touch) == undisturbed
    assert stream_text(target, flag.unlink) == undisturbed
    assert server.get_status("/ready") == 200
    assert server.stop() == 0


@pytest.mark.parametrize("part", ["engine", "all"])
def test_processes_that_freeze_go_on_with_the_same_text(start_target: Start, part: str) -> None:
    target, server = start_target()
    undisturbed = stream_text(target, lambda: None)
    family = target.family() if part == "all" else target.family()[1:]

    def freeze() -> None:
        for process in family:
            process.suspend()
        time.sleep(3.0)
        for process in family:
            process.resume()

    assert stream_text(target, freeze) == undisturbed
    assert server.get_status("/ready") == 200
    assert server.stop() == 0


def test_a_host_without_shared_memory_serves(start_target: Start, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "--mount", "sh", "-c", "umount -l /dev/shm"]
    if unshare is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace without /dev/shm")
    command = [sys.executable, "-m", "llmstack_command", "serve", "llmstack-demo", "--port", "0"]
    log_path = tmp_path / "log"
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            [unshare, "--mount", "sh", "-c", 'umount -l /dev/shm && exec "$@"', "sh", *command],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while "is ready on" not in log_path.read_text() and time.monotonic() < deadline and server.poll() is None:
            time.sleep(0.1)
        url = log_path.read_text().split("is ready on ")[1].split()[0].rstrip("/,")
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert answer.status == 200
    finally:
        family = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        assert not psutil.wait_procs(family, timeout=10)[1]
