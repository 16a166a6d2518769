"""One server that is put through faults: this repository's, or any that answers at `FAULTS_BASE_URL`.

`FAULTS_BASE_URL` and `FAULTS_PID` name a server that runs already, and the process that its faults are sent to.
`FAULTS_SCALE` multiplies the number of clients; the tests hold a tenth of what `docs/reliability.md` reports.
"""

from __future__ import annotations

import os
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

import llmstack_demo_model

SCALE = float(os.environ.get("FAULTS_SCALE", "0.1"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.full)


@dataclass
class Target:
    """A server under test: its address, and its processes where they are known."""

    url: str
    process: psutil.Process | None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)

    def family(self) -> list[psutil.Process]:
        if self.process is None:
            pytest.skip("needs the process of the server: set FAULTS_PID")
        return [self.process, *self.process.children(recursive=True)]

    def num_files(self) -> int:
        return sum(process.num_fds() for process in self.family())

    def resident_mib(self) -> float:
        return sum(float(process.memory_info().rss) for process in self.family()) / 2**20

    def processor_s(self) -> float:
        """Processor time that all processes of the server have used."""
        return sum(times.user + times.system for times in (process.cpu_times() for process in self.family()))

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over its labels; 0 where the server does not have it."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as response:
            text = response.read().decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line))

    def is_idle(self) -> bool:
        return not self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")


@pytest.fixture(scope="session")
def scale() -> float:
    return SCALE


@pytest.fixture(scope="session")
def start_target(
    launch: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Target, Any]]:
    """Starts a server of our own over an engine that repeats the prompt; the target and the server."""

    def start(*arguments: str, step_delay_s: float = 0.005, env: dict[str, str] | None = None) -> tuple[Target, Any]:
        folder = tmp_path_factory.mktemp("models") / f"echo?step_delay_s={step_delay_s}"
        folder.symlink_to(llmstack_demo_model.model_path())
        server = launch(str(folder), "--runner", "echo", "--served-model-name", "model", *arguments, env=env)
        server.wait_until_ready()
        return Target(server.url, psutil.Process(server.process.pid)), server

    return start


@pytest.fixture(scope="session")
def target(start_target: Callable[..., tuple[Target, Any]]) -> Iterator[Target]:
    if url := os.environ.get("FAULTS_BASE_URL"):
        pid = os.environ.get("FAULTS_PID")
        yield Target(url.rstrip("/"), psutil.Process(int(pid)) if pid else None)
        return
    target, server = start_target()
    yield target
    assert server.stop() == 0
    assert "Traceback" not in server.log
