"""Start-up times of a server: open socket, ready, first token."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from llmstack_bench import event_loop
from llmstack_bench.client import CompletionClient, RequestOptions
from llmstack_bench.errors import BenchError
from llmstack_bench.process_tree import TreeMemory, stop_group, tree_memory
from llmstack_bench.workload import RandomWorkload

HOST = "127.0.0.1"
# Precise enough for a start of one second, at a thousandth of a core.
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds since the process was created.

    Attributes:
        socket_s: Until the port accepts a connection.
        ready_s: Until the health route answers 200.
        first_token_s: Until the first token of the first request.
        stop_s: From the signal to the end of the process.
    """

    socket_s: float
    ready_s: float
    first_token_s: float
    stop_s: float
    memory: TreeMemory


def measure_starts(options: argparse.Namespace) -> list[Start]:
    """Starts the command `--num-iters` times, one after the other.

    Raises:
        BenchError: It does not start, or answers no request; the text ends with its last output.
    """
    return [measure_start(options) for _ in range(options.num_iters)]


def measure_start(options: argparse.Namespace) -> Start:
    """Starts the command once, requests one token, and stops it."""
    command, port = command_with_port(options.server_command)
    if is_port_open(port):
        raise BenchError(f"--port {port}: the port is already in use", exit_code=2)
    with tempfile.TemporaryFile() as log:
        started_s = time.perf_counter()
        with started_command(command, log, options.stop_timeout) as process:
            wait = Waiter(process, log, started_s, options.timeout)
            socket_s = wait.until(lambda: is_port_open(port), "its port is open")
            ready_s = wait.until(
                lambda: health_status(port, options.health_path) == 200, f"{options.health_path} answers 200"
            )
            event_loop.run(_first_token(port, options))
            first_token_s = time.perf_counter() - started_s
            memory = tree_memory(process.pid)
            stopped_s = time.perf_counter()
            if not stop_group(process, options.stop_timeout):
                raise BenchError(f"the server did not end within {options.stop_timeout:g} s of SIGTERM")
            return Start(socket_s, ready_s, first_token_s, time.perf_counter() - stopped_s, memory)


def command_with_port(command: Sequence[str]) -> tuple[list[str], int]:
    """The command with a port: its own `--port`, or a free one in place of `{port}` or at the end."""
    words = list(command)
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag == "--port":
            text = value or (words[index + 1] if index + 1 < len(words) else "")
            if text.isdigit() and int(text) > 0:
                return words, int(text)
            if text != "{port}":
                raise BenchError(f"--port {text}: give a port above 0, or no --port for a free one", exit_code=2)
    port = free_port()
    if any("{port}" in word for word in words):
        return [word.replace("{port}", str(port)) for word in words], port
    return [*words, "--port", str(port)], port


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def start_values(starts: Sequence[Start]) -> dict[str, float]:
    """Metric name to value: medians, and the first start alone, which finds a cold disk cache."""
    names = ("socket_s", "ready_s", "first_token_s", "stop_s")
    values = {f"median_{name}": statistics.median(getattr(start, name) for start in starts) for name in names}
    values |= {f"first_{name}": getattr(starts[0], name) for name in names[:3]}
    for name in ("num_processes", "peak_rss", "rss", "pss"):
        unit = "" if name == "num_processes" else "_mib"
        values[f"median_{name}{unit}"] = statistics.median(getattr(start.memory, name) for start in starts)
    return values


@contextlib.contextmanager
def started_command(command: Sequence[str], log: IO[bytes], stop_timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The running command in its own process group, which is killed at the end."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise BenchError(f"{command[0]}: {error.strerror}", exit_code=2) from error
    try:
        yield process
    finally:
        stop_group(process, stop_timeout_s)


@dataclass(frozen=True, slots=True)
class Waiter:
    """Waits for what a started server does."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started_s: float
    timeout_s: float

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Seconds since the start when `condition` first holds."""
        while not condition():
            now_s = time.perf_counter() - self.started_s
            code = self.process.poll()
            if code is not None:
                raise BenchError(f"the server ended with {code} before {what}: {self._last_output()}")
            if now_s > self.timeout_s:
                raise BenchError(f"the server did not start within {self.timeout_s:g} s: waiting until {what}")
            time.sleep(POLL_S)
        return time.perf_counter() - self.started_s

    def _last_output(self) -> str:
        num_bytes = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, num_bytes - 4096))
        lines = self.log.read().decode("utf-8", "replace").split("\n")
        return " | ".join(line.strip() for line in lines if line.strip())[-500:]


def is_port_open(port: int) -> bool:
    """Whether something listens there on this machine."""
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def health_status(port: int, path: str) -> int:
    """The status of a route; 0 where there is no answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


async def _first_token(port: int, options: argparse.Namespace) -> None:
    request_options = RequestOptions(endpoint=options.endpoint, timeout_s=options.timeout, ignore_eos=False)
    request = RandomWorkload(1, options.input_len, 1).requests()[0]
    async with CompletionClient(f"http://{HOST}:{port}", request_options) as client:
        listed = [] if options.model else await client.models()
        model = options.model or str(listed[0].get("id") if listed else "")
        result = await client.send(request_options.encode(request, model))
    if result.error is not None:
        raise BenchError(f"the server is ready but answers no request: {result.error}")
