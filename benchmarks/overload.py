"""Measures a server at ten times its capacity: goodput, refusals and memory.

    python benchmarks/overload.py                        # the default limit, goodput within a TTFT of 10 s
    python benchmarks/overload.py --max-queue-wait 2     # within 2 s
    python benchmarks/overload.py --model demo --seats 256 --max-queue-wait 2

The engine is simulated: every step takes 25 ms, so a request takes as long as its output has tokens. With `--model` it
is a real one. First the peak is measured, with twice as many clients as places. Then requests come at random, at a
multiple of the peak, each on a connection of its own; those that are refused do not return. All answers count at the
peak, and those whose first token is in time later.

Server, client and this process are three. Times of the client hold its own delays; those of the server begin when the
kernel has the last bytes of the headers. Its quantiles are upper bounds: the limits of its histograms. All figures are
of this machine. JSON goes to --output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from llmstack_llm.testing import write_model_folder

MIN_OUTPUT, MAX_OUTPUT = 20, 60
START_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 120.0
NORMAL_AFTER_S = 5.0
MIB = 1 << 20
DEMO = "demo"
LAG_INTERVAL_S = 0.01
REFUSED_PAUSE_S = 0.25
OVERLOAD_BEGINS = "overload begins"


@dataclass
class Answer:
    """What became of one request; times are of this process's monotonic clock."""

    sent_s: float
    max_tokens: int
    status: int = 0
    first_s: float | None = None
    end_s: float = 0.0
    num_tokens: int = 0
    is_complete: bool = False
    retry_after_ms: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_s is None else self.first_s - self.sent_s


@dataclass
class Report:
    """The figures of one run."""

    peak_per_s: float = 0.0
    offered_per_s: float = 0.0
    goodput_per_s: float = 0.0
    goodput_share: float = 0.0
    num_sent: int = 0
    num_accepted: int = 0
    num_incomplete: int = 0
    num_refused: int = 0
    num_other: int = 0
    ttft_ms: dict[str, float] = field(default_factory=dict)
    refusal_ms: dict[str, float] = field(default_factory=dict)
    retry_after_s: dict[str, float] = field(default_factory=dict)
    server_ttft_ms: dict[str, float] = field(default_factory=dict)
    server_refusal_ms: dict[str, float] = field(default_factory=dict)
    client_lag_ms: dict[str, float] = field(default_factory=dict)
    idle_ttft_ms: float = 0.0
    ttft_after_ms: float = 0.0
    idle_mib: float = 0.0
    peak_mib: float = 0.0
    grown_mib: float = 0.0


@contextmanager
def server(seats: int, step_ms: float, arguments: Sequence[str], model: str = "") -> Iterator[tuple[int, int]]:
    """A server over the simulated engine, or over a model: its process id and its port."""
    with tempfile.TemporaryDirectory() as name:
        served = ["llmstack-demo" if model == DEMO else model]
        if not model:
            folder = write_model_folder(Path(name) / f"echo?step_delay_s={step_ms / 1000}")
            served = [str(folder), "--runner", "echo"]
        log = Path(name) / "log"
        command = [
            sys.executable, "-m", "llmstack_command", "serve", *served, "--port", "0",
            "--max-num-seqs", str(seats), "--served-model-name", "echo", "--disable-uvicorn-access-log", *arguments,
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process.pid, _port(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s and process.poll() is None:
        found = re.search(r"is ready on http://[^\s:]+:(\d+)", log.read_text(errors="replace"))
        if found:
            return int(found[1])
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def memory_mib(pid: int) -> float:
    """Proportional memory of a process and all below it."""
    total, found = 0, [pid]
    while found:
        one = found.pop()
        try:
            text = Path(f"/proc/{one}/smaps_rollup").read_text()
            total += int(re.search(r"^Pss:\s+(\d+) kB", text, re.M)[1]) << 10  # type: ignore[index]  # it has the line
            for task in os.listdir(f"/proc/{one}/task"):
                found += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except (OSError, TypeError):
            continue  # it has ended
    return total / MIB


async def ask(port: int, rng: random.Random, headers: str = "") -> Answer:
    """Streams one completion over a connection of its own."""
    answer = Answer(time.monotonic(), rng.randint(MIN_OUTPUT, MAX_OUTPUT))
    body = json.dumps({
        "model": "echo", "prompt": "x" * rng.randint(20, 60), "max_tokens": answer.max_tokens, "stream": True,
        "ignore_eos": True,
    })  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
            answer.status = int((await reader.readline()).split()[1])
            while line := (await reader.readline()).strip():
                if line.lower().startswith(b"retry-after-ms:"):
                    answer.retry_after_ms = int(line.split(b":")[1])
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    answer.is_complete = True
                elif b'"text":"' in line and b'"error"' not in line:
                    answer.first_s = answer.first_s or time.monotonic()
                    answer.num_tokens += 1
        finally:
            writer.close()
    except (OSError, IndexError, ValueError):
        answer.status = answer.status or -1
    answer.end_s = time.monotonic()
    return answer


async def closed_loop(port: int, num_clients: int, duration_s: float, rng: random.Random) -> list[Answer]:
    """Clients that ask again as soon as they have their answer."""
    end_s, answers = time.monotonic() + duration_s, list[Answer]()

    async def client() -> None:
        while time.monotonic() < end_s:
            answers.append(await ask(port, rng))
            if answers[-1].status != 200:  # at once it would only be refused again, and the peak be that of refusals
                await asyncio.sleep(REFUSED_PAUSE_S)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return answers


async def open_loop(port: int, rate: float, duration_s: float, rng: random.Random) -> list[asyncio.Task[Answer]]:
    """Requests at random times, whatever becomes of the ones before."""
    start_s, tasks, at_s = time.monotonic(), list[asyncio.Task[Answer]](), 0.0
    while at_s < duration_s:
        await asyncio.sleep(max(start_s + at_s - time.monotonic(), 0.0))
        tasks.append(asyncio.create_task(ask(port, rng)))
        at_s += rng.expovariate(rate)
    return tasks


def rate_of(answers: Sequence[Answer], start_s: float, end_s: float, ttft_s: float) -> float:
    """Requests per second that got their first token in time, and all of the others, counted by their first token."""
    good = [
        one
        for one in answers
        if one.is_complete and one.first_s and start_s <= one.first_s < end_s and (one.ttft_s or 0) <= ttft_s
    ]
    return len(good) / (end_s - start_s)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the greatest."""
    ordered = sorted(values)
    if not ordered:
        return {}
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(int(len(ordered) * share), len(ordered) - 1)], 1) for name, share in places.items()}


async def measure(port: int, options: argparse.Namespace) -> Report:
    """What the client sees of a server that is ready."""
    rng, report = random.Random(options.seed), Report()
    await closed_loop(port, options.seats, options.peak_seconds / 2, rng)
    report.idle_ttft_ms = round(1000 * ((await ask(port, rng)).ttft_s or 0), 1)
    start_s = time.monotonic()
    answers = await closed_loop(port, 2 * options.seats, options.peak_seconds, rng)
    report.peak_per_s = rate_of(answers, start_s + 2, start_s + options.peak_seconds, inf)
    report.offered_per_s = options.times * report.peak_per_s
    print(OVERLOAD_BEGINS, flush=True)
    lags = list[float]()
    watching = asyncio.create_task(_watch_lag(lags))
    start_s = time.monotonic()
    tasks = await open_loop(port, report.offered_per_s, options.seconds, rng)
    end_s = time.monotonic()
    async with asyncio.timeout(DRAIN_TIMEOUT_S):
        answers = await asyncio.gather(*tasks)
    watching.cancel()
    await asyncio.sleep(NORMAL_AFTER_S)
    report.ttft_after_ms = round(1000 * ((await ask(port, rng)).ttft_s or 0), 1)
    report.client_lag_ms = quantiles(lags)
    _judge(report, answers, start_s, end_s, options.ttft)
    return report


async def _watch_lag(lags: list[float]) -> None:
    """Notes by how many milliseconds the client's own event loop is late."""
    while True:
        due_s = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(1000 * (time.monotonic() - due_s))


def run(pid: int, port: int, arguments: Sequence[str]) -> Report:
    """Runs the client in a process of its own, and adds what only the server and its host know."""
    command = [sys.executable, str(Path(__file__)), *arguments, "--port", str(port)]
    report, before = Report(), dict[str, Buckets]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client, ThreadPoolExecutor(1) as pool:
        lines = pool.submit(_read_client, client, lambda: before.update(histograms(port)))
        while not lines.done():
            memory = memory_mib(pid)
            if not before:
                report.idle_mib = memory
            report.peak_mib = max(report.peak_mib, memory)
            wait([lines], 1.0)
    found = Report(**json.loads(lines.result()))
    found.idle_mib, found.peak_mib = report.idle_mib, report.peak_mib
    found.grown_mib = round(report.peak_mib - report.idle_mib, 1)
    after = histograms(port)
    found.server_refusal_ms = bounds(before[REFUSALS], after[REFUSALS])
    found.server_ttft_ms = bounds(before[FIRST_TOKENS], after[FIRST_TOKENS])
    return found


def _read_client(client: subprocess.Popen[str], on_overload: Callable[[], None]) -> str:
    assert client.stdout is not None
    for line in client.stdout:
        if line.strip() != OVERLOAD_BEGINS:
            return line
        on_overload()
    raise SystemExit("the client ended without a report")


Buckets = dict[float, float]
REFUSALS, FIRST_TOKENS = "llmstack:refusal_seconds", "llmstack:time_to_first_token_seconds"


def histograms(port: int) -> dict[str, Buckets]:
    """The histograms of the server, as upper bounds in seconds and the number of what is at most that."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, Buckets] = {REFUSALS: {}, FIRST_TOKENS: {}}
    for name, bound, number in re.findall(r'^(\S+)_bucket\{.*le="([^"]+)".*\} (\S+)$', text, re.M):
        if name in found:
            found[name][float(bound)] = found[name].get(float(bound), 0.0) + float(number)
    return found


def bounds(before: Buckets, after: Buckets) -> dict[str, float]:
    """Upper bounds of p50 and p99 in milliseconds, of what has come in between."""
    counts = {bound: number - before.get(bound, 0.0) for bound, number in sorted(after.items())}
    total = max(counts.values(), default=0.0)
    if not total:
        return {}
    shares = {"p50": 0.5, "p99": 0.99}
    return {
        name: 1000 * next(bound for bound, number in counts.items() if number >= share * total)
        for name, share in shares.items()
    }


def _judge(report: Report, answers: Sequence[Answer], start_s: float, end_s: float, ttft_s: float) -> None:
    report.goodput_per_s = rate_of(answers, start_s, end_s, ttft_s)
    report.goodput_share = round(report.goodput_per_s / report.peak_per_s, 3)
    accepted = [one for one in answers if one.status == 200]
    refused = [one for one in answers if one.status == 503]
    report.num_sent, report.num_accepted, report.num_refused = len(answers), len(accepted), len(refused)
    report.num_other = len(answers) - len(accepted) - len(refused)
    report.num_incomplete = sum(not one.is_complete for one in accepted)
    report.ttft_ms = quantiles([1000 * one.ttft_s for one in accepted if one.ttft_s is not None])
    report.refusal_ms = quantiles([1000 * (one.end_s - one.sent_s) for one in refused])
    report.retry_after_s = quantiles([one.retry_after_ms / 1000 for one in refused if one.retry_after_ms])


def processor() -> str:
    """The name of this machine's processor."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return f"{found[1] if found else 'unknown'}, {os.cpu_count()} CPUs"


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-queue-wait", type=float, default=10.0, help="the server's limit (default: 10)")
    parser.add_argument("--ttft", type=float, help="seconds to a good first token (default: the server's limit)")
    parser.add_argument("--model", default="", help="a model folder, or 'demo' (default: a simulated engine)")
    parser.add_argument("--times", type=float, default=10.0, help="offered load over the peak (default: 10)")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the overload (default: 20)")
    parser.add_argument("--peak-seconds", type=float, default=12.0, help="duration at the peak (default: 12)")
    parser.add_argument("--seats", type=int, default=16, help="requests that run at one time (default: 16)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="duration of a step (default: 25)")
    parser.add_argument("--seed", type=int, default=1, help="of sizes and arrivals (default: 1)")
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # of the server: this process is its client
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, completed."""
    options = parser().parse_args(arguments)
    options.ttft = options.max_queue_wait if options.ttft is None else options.ttft
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; 0 whatever they are."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.port is not None:
        print(json.dumps(asdict(asyncio.run(measure(options.port, options)))))
        return 0
    limit = ["--max-queue-wait", str(options.max_queue_wait)]
    with server(options.seats, options.step_ms, limit, options.model) as (pid, port):
        report = run(pid, port, arguments)
    figures: dict[str, Any] = {"processor": processor(), "date": time.strftime("%Y-%m-%d"), **asdict(report)}
    text = json.dumps(figures, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
