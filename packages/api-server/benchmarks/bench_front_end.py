"""The front end alone: what streaming costs the API process, with an engine core that echoes instead of computing.

The echo takes 25 ms a step, so that each token of each stream is a chunk of its own, or no time: then a token's whole
way is the time between two, and where the front end is the slower one, chunks hold several. A real server is started
with the echoing model runner. Processor seconds are read from the system and not from the clock, so the figures hold on
a machine with other work; the load generator has a process of its own. With `--pid` and
`--url` the same load goes to another server that runs already, such as vLLM's:

    python packages/api-server/benchmarks/bench_front_end.py
    python packages/api-server/benchmarks/bench_front_end.py --url http://127.0.0.1:8101 --model gpt2 --pid 4711
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NUM_OUTPUT_TOKENS = 128
NUM_WORDS = 1000
MAX_BLOCKS = 131_072  # of the echoing runner
CONFIG = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 1,
    "n_positions": 4096, "vocab_size": NUM_WORDS, "eos_token_id": 0,
}  # fmt: skip
PROCESS_CLOCK = 2  # in the number of a clock, of Linux: the processor time of a process


@dataclass
class Target:
    """A running server and the process whose processor time counts."""

    host: str
    port: int
    pid: int
    model: str | None = None
    headers: tuple[str, ...] = ("",)  # further lines, which the requests have in turn

    def cpu_s(self) -> float:
        """Processor seconds of the API process so far."""
        return time.clock_gettime(~self.pid << 3 | PROCESS_CLOCK)


@dataclass
class Load:
    """What came of one load."""

    seconds: float
    num_chunks: int
    first_s: list[float]
    gaps_s: list[float]
    pings_s: list[float]


def write_echo_folder(folder: Path) -> None:
    """A word-level tokenizer whose every id has text, so that every token makes a chunk."""
    folder.joinpath("config.json").write_text(json.dumps(CONFIG))
    vocab = {f"w{i}": i for i in range(NUM_WORDS)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    folder.joinpath("tokenizer.json").write_text(json.dumps(tokenizer))


@contextmanager
def echo_server(step_s: float, options: Sequence[str] = ()) -> Iterator[Target]:
    """`llmstack serve` with the echoing runner, whose own options stand in the name of the folder."""
    with tempfile.TemporaryDirectory() as name:
        runner_options = f"step_delay_s={step_s}&vocab_size={NUM_WORDS}&num_available_blocks={MAX_BLOCKS}"
        folder, log_path = Path(name) / f"echo?{runner_options}", Path(name) / "log"
        folder.mkdir()
        write_echo_folder(folder)
        command = [sys.executable, "-m", "llmstack_command", "serve", str(folder), "--port", "0"]
        command += ["--served-model-name", "echo", "--max-num-seqs", "512", "--max-queue-wait", "3600"]
        command += ["--runner", "echo", "--num-kv-blocks", "16384", "--max-model-len", "4096", "--max-num-queued-reqs"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "4096", "--disable-uvicorn-access-log", *options], stdout=log, stderr=log
            )
        try:
            while "is ready on http://" not in log_path.read_text():
                if process.poll() is not None:
                    raise RuntimeError(log_path.read_text())
                time.sleep(0.02)
            url = urlsplit("http://" + log_path.read_text().split("is ready on http://")[1].split()[0])
            yield Target(url.hostname or "", url.port or 0, process.pid)
        finally:
            process.terminate()
            process.wait(30)


async def _stream(target: Target, path: str, body: dict[str, Any], load: Load, headers: str) -> None:
    payload = json.dumps(body | ({"model": target.model} if target.model else {})).encode()
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\n"
    last_s = sent_s = time.perf_counter()
    writer.write(head.encode() + headers.encode() + b"Connection: close\r\n\r\n" + payload)
    if b" 200 " not in (status := await reader.readline()):
        raise RuntimeError(f"{status!r}: {await reader.read()!r}")
    while data := await reader.read(1 << 16):
        now_s, num_chunks = time.perf_counter(), data.count(b"data: {")
        if num_chunks:
            (load.first_s if last_s == sent_s else load.gaps_s).append((now_s - last_s) / num_chunks)
            load.num_chunks += num_chunks
            last_s = now_s
    writer.close()


async def _run(target: Target, path: str, body: dict[str, Any], concurrency: int, num_requests: int) -> Load:
    load, gate = Load(0.0, 0, [], [], []), asyncio.Semaphore(concurrency)

    async def one(index: int) -> None:
        async with gate:
            await _stream(target, path, body, load, target.headers[index % len(target.headers)])

    started_s = time.perf_counter()
    pinging = asyncio.create_task(_ping(target, load))
    await asyncio.gather(*(one(index) for index in range(num_requests)))
    load.seconds = time.perf_counter() - started_s
    pinging.cancel()
    return load


async def _ping(target: Target, load: Load) -> None:
    """How long the event loop lets an answer wait that needs nothing."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    while True:
        sent_s = time.perf_counter()
        writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"}")
        load.pings_s.append(time.perf_counter() - sent_s)
        await asyncio.sleep(0.02)


def send_from_stdin() -> None:
    """The generator's process: what to send comes as JSON, and what came of it goes out as JSON."""
    target, *load = json.load(sys.stdin)
    print(json.dumps(asdict(asyncio.run(_run(Target(**target), *load)))))


def streamed(target: Target, path: str, body: dict[str, Any], concurrency: int, num_requests: int) -> dict[str, float]:
    """The figures of one load, sent by a process of its own."""
    before_s = target.cpu_s()
    what = json.dumps([asdict(target), path, body, concurrency, num_requests])
    done = subprocess.run(
        [sys.executable, __file__, "--send"], input=what, stdout=subprocess.PIPE, check=True, text=True
    )
    load = Load(**json.loads(done.stdout))
    cpu_s = target.cpu_s() - before_s
    num_tokens = num_requests * body["max_tokens"]
    return {
        "tokens/s": num_tokens / load.seconds,
        "tokens per CPU second": num_tokens / cpu_s,
        "chunks per CPU second": load.num_chunks / cpu_s,
        "requests per CPU second": num_requests / cpu_s,
        "TTFT p50 ms": percentile_ms(load.first_s, 0.5),
        "between chunks p50 ms": percentile_ms(load.gaps_s, 0.5),
        "between chunks p99 ms": percentile_ms(load.gaps_s, 0.99),
        "another answer p50 ms": percentile_ms(load.pings_s, 0.5),
        "another answer p99 ms": percentile_ms(load.pings_s, 0.99),
    }


def percentile_ms(values_s: list[float], share: float) -> float:
    """The value below which `share` of the values lie, in milliseconds; 0 of none."""
    return sorted(values_s)[int(share * len(values_s))] * 1000 if values_s else 0.0


def loads(model_words: str) -> dict[str, tuple[str, dict[str, Any], int, int]]:
    """Name to path, body, concurrency and number of requests."""
    stream = {"stream": True, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    completion = {"prompt": model_words, **stream}
    chat = {"messages": [{"role": "user", "content": model_words}], **stream}
    short = {"prompt": model_words, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
    return {
        "1": ("/v1/completions", completion, 1, 4),
        "32": ("/v1/completions", completion, 32, 64),
        "256": ("/v1/completions", completion, 256, 512),
        "chat 256": ("/v1/chat/completions", chat, 256, 512),
        "1 token, 64": ("/v1/completions", short, 64, 1024),
    }


def measure(target: Target, names: list[str]) -> dict[str, dict[str, float]]:
    """Load to its figures; the first requests are left out."""
    words = " ".join(f"w{i}" for i in range(1, 33))
    known = loads(words)
    streamed(target, *known["1 token, 64"][:2], 8, 32)
    return {name: streamed(target, *known[name]) for name in names or known}


@pytest.mark.parametrize("step_s", [0.0, 0.025])
def test_the_front_end(benchmark: Any, step_s: float) -> None:
    with echo_server(step_s) as target:
        found: list[dict[str, dict[str, float]]] = []
        benchmark.pedantic(lambda: found.append(measure(target, [])), rounds=1, iterations=1)
    benchmark.extra_info.update({name: _rounded(figures) for name, figures in found[0].items()})


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already; needs --pid")
    parser.add_argument("--pid", type=int, help="the process of it that answers HTTP")
    parser.add_argument("--model", help="what its requests must name")
    parser.add_argument("--load", action="append", default=[], metavar="NAME", help="one of the loads only")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        return send_from_stdin()
    if options.url:
        url = urlsplit(options.url)
        report(measure(Target(url.hostname or "", url.port or 80, options.pid, options.model), options.load))
        return
    for step_s in (0.0, 0.025):
        print(f"steps of {step_s * 1000:g} ms")
        with echo_server(step_s) as target:
            report(measure(target, options.load))


def report(found: dict[str, dict[str, float]]) -> None:
    """Prints a table."""
    for label in next(iter(found.values())):
        print(f"{label:>24}", *(f"{figures[label]:>12,.2f}" for figures in found.values()))
    print(f"{'':>24}", *(f"{name:>12}" for name in found))


if __name__ == "__main__":
    main()
