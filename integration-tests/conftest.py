"""Real servers for the tests: processes, sockets and signals, started through the command as a user would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from client_environments import install as install
from server_calls import PROMPTS, complete
from two_machines import Namespaces

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
READY_TIMEOUT_S = 120
EMBEDDED = {"LLMSTACK_MODEL": "llmstack-demo"}
"""Servers for which a test names no model get the embedded one, whatever is installed here."""


class Server:
    """One `llmstack serve` process, its log, and the address it chose."""

    def __init__(
        self, arguments: list[str], log_path: Path, env: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        command = [*prefix, sys.executable, "-m", "llmstack_command", "serve", *arguments]
        if "--port" not in arguments:
            command += ["--port", "0"]
        self.log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **EMBEDDED, **(env or {})}
            )
        self.url = ""
        self._on_stop: list[Callable[[], None]] = []

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @cached_property
    def client(self) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self._on_stop.append(client.close)
        return client

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = READY_TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {what}; exit code {self.process.poll()}; log:\n{self.log[-4000:]}")

    def wait_until_listening(self) -> None:
        found = self.wait_for(lambda: re.search(r"http://[\d.]+:\d+", self.log), "address in the log")
        self.url = found.group(0)

    def wait_until_ready(self) -> None:
        self.wait_until_listening()
        self.wait_for(lambda: self.get_status("/health") == 200, "ready server")

    def get_status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def get_json(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over its labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            text = response.read().decode()
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line)]
        assert values, f"metric {name} is absent"
        return sum(values)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """POSTs JSON, or raw bytes; the status, the decoded body and the headers in lower case."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response), {k.lower(): v for k, v in response.headers.items()}
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), {k.lower(): v for k, v in error.headers.items()}

    def engine_pids(self) -> list[int]:
        return self._pids_of("llmstack_engine_core.process")

    def api_pids(self) -> list[int]:
        """The API processes of a server that has several."""
        return self._pids_of("llmstack_server.serving.api_worker")

    def rank_pids(self) -> list[int]:
        """The ranks beside those in the engine cores."""
        return self._pids_of("llmstack_parallel.rank")

    def _pids_of(self, module: str) -> list[int]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(module in part for part in child.cmdline()):
                    found.append(child.pid)
        return found

    def engine_pid(self) -> int:
        engines = self.engine_pids()
        assert len(engines) == 1, engines
        return engines[0]

    def close_client(self) -> None:
        while self._on_stop:
            self._on_stop.pop()()

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = 60) -> int:
        """Sends a signal and returns the exit code; no process of the server is left when it returns."""
        family = []
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(sig)
        code = self.process.wait(timeout_s)
        self.close_client()
        _gone, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"left behind: {alive}"
        return code

    def kill_all(self) -> None:
        """Ends all processes of the server without a word, at once."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        for process in family:
            process.kill()
        self.process.wait(30)
        psutil.wait_procs(family, timeout=30)
        self.close_client()


@contextmanager
def running(arguments: list[str], log_path: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server(arguments, log_path, env)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A context manager `serve(*arguments)` that yields a ready server and stops it afterwards."""

    def start(*arguments: str, env: dict[str, str] | None = None) -> Any:
        return running(list(arguments), tmp_path_factory.mktemp("server") / "log", env)

    return start


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server without waiting for it; what is still alive at the end is killed."""
    started: list[Server] = []

    def start(*arguments: str, env: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> Server:
        server = Server(list(arguments), tmp_path_factory.mktemp("server") / "log", env, prefix)
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)
        server.close_client()


@pytest.fixture(scope="session")
def demo_server(serve: Callable[..., Any]) -> Iterator[Server]:
    """The embedded demo model, as `make serve` starts it, shared by the tests that leave no trace in it."""
    with serve() as server:
        yield server


@pytest.fixture(scope="session")
def namespaces() -> Iterator[Namespaces]:
    """Two machines; skips where they are forbidden."""
    places = Namespaces()
    yield places
    places.close()


def shared_model(name: str) -> Path:
    path = SHARED / "models" / name
    if not path.is_dir():
        pytest.skip(f"needs the folder ../shared/models/{name}, which is not beside this checkout")
    return path


@pytest.fixture(scope="session")
def gpt2_path() -> Path:
    """GPT-2's configuration and tokenizer, without weights."""
    return shared_model("gpt2")


@pytest.fixture(scope="session")
def stories_path() -> Path:
    """A trained 260K-parameter Llama with published greedy output."""
    return shared_model("stories260k")


@pytest.fixture
def runtime_folder() -> Iterator[Path]:
    """Where a server of this test puts its sockets; a short path, since those of sockets are limited."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="session")
def expected(demo_server: Any) -> list[str]:
    """What the demo model writes after each of `PROMPTS`, alone."""
    return [complete(demo_server, prompt) for prompt in PROMPTS]
