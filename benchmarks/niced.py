"""The time between tokens of several streams, with niced programs on the same processors and without, in turns.

    python benchmarks/niced.py
    python benchmarks/niced.py --model gpt2 --streams 8 --tokens 128 --options "--dtype bfloat16" --rounds 7

The times are those of the wall at the client, so the machine must have nothing else to do. Each round serves all
streams alone, and then beside one program for each processor that counts without end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

_BUSY = "import os, sys\nos.nice(int(sys.argv[1]))\nwhile True: pass"


@contextmanager
def serving(model: str, options: list[str]) -> Iterator[tuple[str, int]]:
    """A server; its host and port."""
    with tempfile.TemporaryDirectory() as name:
        log_path = Path(name) / "log"
        command = [sys.executable, "-m", "llmstack_command", "serve", model, "--port", "0", *options]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while "is ready on http://" not in log_path.read_text():
                if process.poll() is not None:
                    raise RuntimeError(log_path.read_text()[-2000:])
                time.sleep(0.1)
            url = urlsplit("http://" + log_path.read_text().split("is ready on http://")[1].split()[0])
            yield url.hostname or "", url.port or 0
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def busy_programs(number: int, niceness: int) -> Iterator[None]:
    """So many programs that use all the processor time that they get."""
    programs = [subprocess.Popen([sys.executable, "-c", _BUSY, str(niceness)]) for _ in range(number)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for program in programs:
            program.terminate()
            program.wait()


async def stream(host: str, port: int, model: str, number: int, num_tokens: int) -> list[float]:
    """Seconds between the chunks of one stream."""
    body = {
        "model": model, "prompt": f"Story {number} of some", "max_tokens": num_tokens, "ignore_eos": True,
        "temperature": 0, "stream": True,
    }  # fmt: skip
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {await reader.read()!r}")
    times_s: list[float] = []
    while data := await reader.read(1 << 16):
        times_s += [time.perf_counter()] * (data.count(b"data: {") > 0)
    writer.close()
    return [after - before for before, after in itertools.pairwise(times_s)]


async def streams(host: str, port: int, model: str, num_streams: int, num_tokens: int) -> list[float]:
    """The gaps of all streams at once."""
    gaps = await asyncio.gather(*(stream(host, port, model, one, num_tokens) for one in range(num_streams)))
    return sorted(gap for one in gaps for gap in one)


def main() -> None:
    """Prints medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llmstack-demo")
    parser.add_argument("--name", default="", help="the name that the server knows the model by (default: --model)")
    parser.add_argument("--options", default="", help="further options of the server")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nice", type=int, default=10, help="niceness of the other programs (default: 10)")
    parser.add_argument("--programs", type=int, default=len(os.sched_getaffinity(0)), help="how many there are")
    arguments = parser.parse_args()
    name = arguments.name or arguments.model
    found: dict[str, list[tuple[float, float, float]]] = {"alone": [], "beside niced programs": []}
    with serving(arguments.model, shlex.split(arguments.options)) as (host, port):
        asyncio.run(streams(host, port, name, arguments.streams, arguments.tokens))
        for _ in range(arguments.rounds):
            for kind, rounds in found.items():
                with busy_programs(0 if kind == "alone" else arguments.programs, arguments.nice):
                    gaps = asyncio.run(streams(host, port, name, arguments.streams, arguments.tokens))
                rounds.append((gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100], gaps[-1]))
    print(f"{arguments.streams} streams of {name}, milliseconds between tokens, medians of {arguments.rounds} rounds")
    print("| | p50 | p99 | longest |\n|---|---|---|---|")
    for kind, rounds in found.items():
        cells = " | ".join(f"{statistics.median(one) * 1000:.1f}" for one in zip(*rounds, strict=True))
        print(f"| {kind} | {cells} |")


if __name__ == "__main__":
    main()
