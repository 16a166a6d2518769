"""Compares two servers in turns on a busy machine: times, and processor times of their processes, per token.

Processor time leaves out what other programs take, except for memory and caches. Give both servers one thread: threads
that wait for one another take processor time too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TOKENS = range(300, 31_000)


class Load(NamedTuple):
    """Requests at once, with so many tokens in and out, repeated for the median."""

    name: str
    num_rows: int
    prompt: int
    output: int
    repetitions: int

    @property
    def num_tokens(self) -> int:
        """Tokens that count: those of the output, or of the prompt where it has one."""
        return self.num_rows * (self.output if self.output > 1 else self.prompt)


LOADS = (
    Load("one stream, 16 + 48", 1, 16, 48, 5),
    Load("prompt of 512", 1, 512, 1, 5),
    Load("8 at once, 32 + 32", 8, 32, 32, 3),
)


class Server(NamedTuple):
    """A server, and the first of its processes."""

    url: str
    pid: int
    model: str

    def ask(self, load: Load) -> None:
        """One request, whose answer must have all tokens."""
        body = {"model": self.model, "prompt": random.choices(TOKENS, k=load.prompt), "max_tokens": load.output,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        answer = read_json(f"{self.url}/v1/completions", json.dumps(body).encode())
        if answer["usage"]["completion_tokens"] != load.output:
            raise SystemExit(f"{self.url} has generated {answer['usage']}")

    def measure(self, load: Load) -> tuple[float, float]:
        """Seconds, and processor seconds."""
        before, started_s = processor_s(self.pid), time.perf_counter()
        with ThreadPoolExecutor(load.num_rows) as pool:
            list(pool.map(self.ask, [load] * load.num_rows))
        return time.perf_counter() - started_s, processor_s(self.pid) - before


def read_json(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def processes(pid: int) -> Iterator[int]:
    """A process and those that it has started."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from processes(int(child))


def processor_s(pid: int) -> float:
    fields = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in processes(pid)]
    return sum(int(own[11]) + int(own[12]) for own in fields) / TICKS_PER_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", action="append", required=True, help="of each of the two servers")
    parser.add_argument("--server-pid", action="append", required=True, type=int)
    options = parser.parse_args()
    names = [read_json(f"{url}/v1/models")["data"][0]["id"] for url in options.base_url]
    servers = [Server(*each) for each in zip(options.base_url, options.server_pid, names, strict=True)]
    for server in servers:
        server.ask(Load("warm-up", 1, 16, 4, 1))
    print("| | tokens/s | | ratio | processor ms per token | | ratio |\n|---|---|---|---|---|---|---|")
    for load in LOADS:
        found: list[list[tuple[float, float]]] = [[], []]
        for turn in range(load.repetitions):
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                found[index].append(servers[index].measure(load))
        cells = []
        for part in (0, 1):
            medians = [statistics.median(run[part] for run in runs) for runs in found]
            ratio = statistics.median(theirs[part] / ours[part] for ours, theirs in zip(*found, strict=True))
            shown = [load.num_tokens / one if part == 0 else 1e3 * one / load.num_tokens for one in medians]
            cells += [*(f"{one:.2f}" for one in shown), f"{ratio:.2f}"]
        print(f"| {load.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
