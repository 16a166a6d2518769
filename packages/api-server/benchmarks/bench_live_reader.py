"""What one reader of `/live/events` costs a server with 256 running requests.

An echoing model takes 25 ms a step. The same load runs throughout, and windows of some seconds take turns without and
with the reader. The figures are shares of a core: processor time over the time of a window, so they hold where other
programs run.

    python packages/api-server/benchmarks/bench_live_reader.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import bench_front_end
from bench_front_end import Target, echo_server
from bench_parts import OPERATOR, STEP_S, live_reader

NUM_STREAMS = 256
NUM_TOKENS = 4000  # more than the windows last
WINDOW_S = 5.0
NUM_TURNS = 7


@contextmanager
def load_on(target: Target) -> Iterator[None]:
    """Streams that do not end."""
    words = " ".join(f"w{i}" for i in range(32))
    body = {"prompt": words, "stream": True, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    what = json.dumps([asdict(target), "/v1/completions", body, NUM_STREAMS, NUM_STREAMS])
    command = [sys.executable, bench_front_end.__file__, "--send"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(what)
            process.stdin.close()
            wait_until_running(target)
            yield
        finally:
            process.kill()


def num_running(target: Target) -> float:
    """Requests that the engine core runs."""
    request = Request(f"http://{target.host}:{target.port}/metrics", headers={"Authorization": f"Bearer {OPERATOR}"})
    with urlopen(request) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running{"))


def wait_until_running(target: Target) -> None:
    """Returns when all streams run."""
    deadline_s = time.monotonic() + 30
    while num_running(target) < NUM_STREAMS:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{num_running(target)} of {NUM_STREAMS} requests run")
        time.sleep(0.2)


def engine_core_of(target: Target) -> Target:
    """The engine core's process, a child of the API process."""
    children = Path(f"/proc/{target.pid}/task/{target.pid}/children").read_text().split()
    for child in children:
        if b"llmstack_engine_core.process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return replace(target, pid=int(child))
    raise RuntimeError(f"no child of {target.pid} is an engine core")


def shares(processes: dict[str, Target], window_s: float) -> dict[str, float]:
    """Processor time of each process, in percent of a core, during one window."""
    began_s, before = time.perf_counter(), {name: process.cpu_s() for name, process in processes.items()}
    time.sleep(window_s)
    taken_s = time.perf_counter() - began_s
    return {name: 100 * (process.cpu_s() - before[name]) / taken_s for name, process in processes.items()}


def measure(num_turns: int = NUM_TURNS, window_s: float = WINDOW_S) -> dict[str, list[tuple[float, float]]]:
    """Percent of a core without and with the reader, of each process in each turn."""
    found: dict[str, list[tuple[float, float]]] = {"API process": [], "engine core": []}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Path(folder, "operators").write_text(OPERATOR)
        options = ["--api-key", "key-0", "--operator-key-file", f"{folder}/operators", "--num-kv-blocks", "81920"]
        target = stack.enter_context(echo_server(STEP_S, options))
        stack.enter_context(load_on(replace(target, headers=("Authorization: Bearer key-0\r\n",))))
        processes = {"API process": target, "engine core": engine_core_of(target)}
        for _ in range(num_turns):
            without = shares(processes, window_s)
            with live_reader(target):
                time.sleep(1)  # what it gets first is more than what follows
                beside = shares(processes, window_s)
            for name in found:
                found[name].append((without[name], beside[name]))
        assert num_running(target) == NUM_STREAMS, "the load has ended too early"
    return found


def test_live_reader(benchmark: Any) -> None:
    found: list[dict[str, list[tuple[float, float]]]] = []
    benchmark.pedantic(lambda: found.append(measure()), rounds=1, iterations=1)
    extra = {name: round(median(more - less for less, more in turns), 2) for name, turns in found[0].items()}
    benchmark.extra_info.update(extra)


def main() -> None:
    """Prints a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--window-s", type=float, default=WINDOW_S)
    options = parser.parse_args()
    if options.turns * (2 * options.window_s + 1) > 0.9 * NUM_TOKENS * STEP_S:
        parser.error(f"the load lasts {NUM_TOKENS * STEP_S:g} s: choose fewer or shorter turns")
    for name, turns in measure(options.turns, options.window_s).items():
        without, beside = (median(values) for values in zip(*turns, strict=True))
        more = [more - less for less, more in turns]
        print(f"{name}: {without:.2f} % of a core without, {beside:.2f} % with a reader, {median(more):+.2f}", end=" ")
        print([round(value, 2) for value in more])


if __name__ == "__main__":
    main()
