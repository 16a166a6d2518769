"""Measures a server at ten times its capacity: goodput, refusals and memory.

    python benchmarks/overload.py                        # --max-queue-wait 1.5, goodput within a TTFT of 2 s
    python benchmarks/overload.py --max-queue-wait 30 --ttft 32 --seconds 60

The engine is simulated: every step takes 25 ms, so a request takes as long as its output has tokens. First the peak is
measured, with twice as many clients as places. Then requests come at random, at a multiple of the peak, each on a
connection of its own; those that are refused do not return. All figures are of this machine. JSON goes to --output.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmstack_llm.testing import write_model_folder

MIN_OUTPUT, MAX_OUTPUT = 20, 60
START_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 120.0
NORMAL_AFTER_S = 5.0
MIB = 1 << 20


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
    idle_ttft_ms: float = 0.0
    ttft_after_ms: float = 0.0
    idle_mib: float = 0.0
    peak_mib: float = 0.0
    grown_mib: float = 0.0


@contextmanager
def server(seats: int, step_ms: float, arguments: Sequence[str]) -> Iterator[tuple[int, int]]:
    """A server over the simulated engine: its process id and its port."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_model_folder(Path(name) / f"echo?step_delay_s={step_ms / 1000}")
        log = Path(name) / "log"
        command = [
            sys.executable, "-m", "llmstack_command", "serve", str(folder), "--runner", "echo", "--port", "0",
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


async def measure(pid: int, port: int, options: argparse.Namespace) -> Report:
    """One run against a server that is ready."""
    rng, report = random.Random(options.seed), Report()
    await closed_loop(port, options.seats, options.peak_seconds / 2, rng)
    report.idle_ttft_ms = round(1000 * ((await ask(port, rng)).ttft_s or 0), 1)
    start_s = time.monotonic()
    answers = await closed_loop(port, 2 * options.seats, options.peak_seconds, rng)
    report.peak_per_s = rate_of(answers, start_s + 2, start_s + options.peak_seconds, options.ttft)
    report.idle_mib = memory_mib(pid)
    report.offered_per_s = options.times * report.peak_per_s
    sampling = asyncio.create_task(_sample_memory(pid, report))
    start_s = time.monotonic()
    tasks = await open_loop(port, report.offered_per_s, options.seconds, rng)
    end_s = time.monotonic()
    async with asyncio.timeout(DRAIN_TIMEOUT_S):
        answers = await asyncio.gather(*tasks)
    sampling.cancel()
    await asyncio.sleep(NORMAL_AFTER_S)
    report.ttft_after_ms = round(1000 * ((await ask(port, rng)).ttft_s or 0), 1)
    _judge(report, answers, start_s, end_s, options.ttft)
    return report


async def _sample_memory(pid: int, report: Report) -> None:
    while True:
        report.peak_mib = max(report.peak_mib, await asyncio.to_thread(memory_mib, pid))
        report.grown_mib = round(report.peak_mib - report.idle_mib, 1)
        await asyncio.sleep(1.0)


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
    parser.add_argument("--max-queue-wait", type=float, default=1.5, help="the server's limit (default: 1.5)")
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds to a good first token (default: 2)")
    parser.add_argument("--times", type=float, default=10.0, help="offered load over the peak (default: 10)")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the overload (default: 20)")
    parser.add_argument("--peak-seconds", type=float, default=12.0, help="duration at the peak (default: 12)")
    parser.add_argument("--seats", type=int, default=16, help="requests that run at one time (default: 16)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="duration of a step (default: 25)")
    parser.add_argument("--seed", type=int, default=1, help="of sizes and arrivals (default: 1)")
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures; 0 whatever they are."""
    options = parser().parse_args(arguments)
    with server(options.seats, options.step_ms, ["--max-queue-wait", str(options.max_queue_wait)]) as (pid, port):
        report = asyncio.run(measure(pid, port, options))
    figures: dict[str, Any] = {"processor": processor(), "date": time.strftime("%Y-%m-%d"), **asdict(report)}
    text = json.dumps(figures, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
