"""The throughput of two machines that are one endpoint, beside two servers, each pinned to a processor.

python benchmarks/replica_throughput.py
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.ipc.addresses import free_port
from llmstack_engine_core.ipc.keys import make_key_file

HOST = "127.0.0.1"
NUM_STREAMS = 32
NUM_TOKENS = 96
NUM_REPEATS = 21
START_TIMEOUT_S = 120.0
ENGINE_OPTIONS = ("--max-num-seqs", "64", "--num-kv-blocks", "512")


class Turn(NamedTuple):
    """Tokens per second, and microseconds of the processors for each token: of the engine cores, and of all."""

    rate: float
    engine_us: float
    all_us: float


@contextmanager
def serving(processor: int, *options: str) -> Iterator[psutil.Process]:
    """A server on one processor."""
    command = ["taskset", "-c", str(processor), sys.executable, "-m", "llmstack_command", "serve", "llmstack-demo"]
    server = subprocess.Popen(
        [*command, *ENGINE_OPTIONS, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(60)


def wait_until_ready(port: int, num_engines: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/server_info", timeout=5) as response:
                engines = json.load(response)["engines"]
        except OSError:
            continue
        if len(engines) == num_engines and all(engine.get("state", "ready") == "ready" for engine in engines):
            return
    raise TimeoutError(f"port {port} has no {num_engines} engine cores")


def generate(port: int, number: int) -> int:
    body = {"model": "llmstack-demo", "prompt": f"Story {number} of some", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions",
        json.dumps(body | {"temperature": 0}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


def processor_seconds(servers: Sequence[psutil.Process]) -> tuple[float, float]:
    """Of the engine cores, and of all processes."""
    engines, others = 0.0, 0.0
    for server in servers:
        for process in (server, *server.children(recursive=True)):
            spent = sum(process.cpu_times()[:2])
            is_engine = "llmstack_engine_core.process" in process.cmdline()
            engines, others = engines + spent * is_engine, others + spent * (not is_engine)
    return engines, engines + others


def turn(ports: Sequence[int], servers: Sequence[psutil.Process]) -> Turn:
    """All streams at the same time, shared out over the ports."""
    before, start = processor_seconds(servers), time.perf_counter()
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        futures = [pool.submit(generate, ports[number % len(ports)], number) for number in range(NUM_STREAMS)]
        num_tokens = sum(future.result() for future in futures)
    seconds = time.perf_counter() - start
    spent = [
        (after - earlier) / num_tokens * 1e6 for after, earlier in zip(processor_seconds(servers), before, strict=True)
    ]
    return Turn(num_tokens / seconds, *spent)


def main() -> None:
    """Both at the same time would share the processors, so they take turns."""
    if shutil.which("taskset") is None or (os.cpu_count() or 1) < 2:
        sys.exit("needs taskset and two processors")
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        key_file = Path(folder) / "cluster.key"
        make_key_file(key_file)
        ports = [free_port(HOST) for _ in range(3)]
        joined = [
            "-dp",
            "2",
            "-dpl",
            "1",
            "-dpa",
            HOST,
            "-dpp",
            str(free_port(HOST)),
            "--cluster-key-file",
            str(key_file),
        ]
        first = stack.enter_context(serving(0, "--port", str(ports[0]), *joined))
        other = stack.enter_context(serving(1, *joined, "--headless", "-dpr", "1"))
        alone = [stack.enter_context(serving(place, "--port", str(ports[1 + place]))) for place in (0, 1)]
        for port, num_engines in zip(ports, (2, 1, 1), strict=True):
            wait_until_ready(port, num_engines)
        found = [(turn(ports[:1], (first, other)), turn(ports[1:], alone)) for _ in range(NUM_REPEATS + 1)]
        for name, index in (
            ("tokens per second", 0),
            ("engine cores, us per token", 1),
            ("all processes, us per token", 2),
        ):
            one, two = (statistics.median(pair[side][index] for pair in found[1:]) for side in (0, 1))
            print(f"{name}: one endpoint {one:.0f}, two servers {two:.0f}, ratio {one / two:.2f}", flush=True)


if __name__ == "__main__":
    main()
