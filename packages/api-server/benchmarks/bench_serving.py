"""The whole stack over loopback HTTP: start-up, memory, tokens per second, TTFT and inter-token latency.

A server of GPT-2's shape with random weights is started through the command; requests of 128 prompt and 128 output
tokens stream at a fixed concurrency. Beside the tokens per second stands the share of the machine's limit that they
are: the rate at which the same run could read the weights from memory, once per step.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NUM_PROMPT_TOKENS = 128
NUM_OUTPUT_TOKENS = 128
VOCAB_SIZE = 50257
GPT2_CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": VOCAB_SIZE,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
}
NUM_WEIGHTS = 124_000_000


@dataclass
class BenchServer:
    """A server of GPT-2's size, and what its start cost."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    dtype: str
    start_s: float
    log: Path

    def api_process_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


@dataclass
class StreamTimes:
    """When the pieces of one answer arrived, in seconds since the request was sent."""

    arrivals_s: list[float] = field(default_factory=list)


def write_gpt2_folder(folder: Path) -> None:
    """GPT-2's shape with a word-level tokenizer: token ids go in and come out, text does not matter here."""
    folder.joinpath("config.json").write_text(json.dumps(GPT2_CONFIG))
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE - 1)} | {"<|endoftext|>": VOCAB_SIZE - 1}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<|endoftext|>"},
    }
    folder.joinpath("tokenizer.json").write_text(json.dumps(tokenizer))
    folder.joinpath("tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def start_server(folder: Path, dtype: str) -> BenchServer:
    """Starts the command and waits until it is ready; the seconds include the interpreter's own start."""
    log_path = folder / f"server-{dtype}.log"
    command = [sys.executable, "-m", "llmstack_command", "serve", str(folder), "--load-format", "dummy", "--port", "0"]
    started_s = time.perf_counter()
    with log_path.open("wb") as log:
        process = subprocess.Popen([*command, "--dtype", dtype], stdout=log, stderr=subprocess.STDOUT)
    while "is ready on http://" not in log_path.read_text():
        if process.poll() is not None:
            raise RuntimeError(log_path.read_text())
        time.sleep(0.01)
    start_s = time.perf_counter() - started_s
    address = log_path.read_text().split("is ready on http://")[1].split()[0].rstrip("/")
    host, port = address.rsplit(":", 1)
    return BenchServer(process, host, int(port), dtype, start_s, log_path)


async def stream_one(server: BenchServer, prompt: list[int]) -> StreamTimes:
    """One streamed completion over a plain socket: the load generator must cost next to nothing beside the server."""
    body = {"prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    times, sent_s = StreamTimes(), time.perf_counter()
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    if b" 200 " not in (status := await reader.readline()):
        raise RuntimeError(f"{status!r}: {await reader.read()!r}")
    async for line in reader:
        if line.startswith(b"data: {"):
            times.arrivals_s.append(time.perf_counter() - sent_s)
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return times


async def run_load(server: BenchServer, concurrency: int, num_requests: int) -> tuple[float, list[StreamTimes]]:
    """Seconds for all requests at a fixed concurrency, and each stream's arrivals."""
    numbers = random.Random(concurrency)
    prompts = [[numbers.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(num_requests)]
    gate = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> StreamTimes:
        async with gate:
            return await stream_one(server, prompt)

    started_s = time.perf_counter()
    times = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return time.perf_counter() - started_s, list(times)


def read_bandwidth_bytes_per_s() -> float:
    """What two threads read from memory just now, best of five; a child measures it, to keep torch out of here."""
    script = (
        "import time, torch; x = torch.ones(64 << 20); t = []\n"
        "for _ in range(5): s = time.perf_counter(); x.sum(); t.append(time.perf_counter() - s)\n"
        "print(x.numel() * 4 / min(t))"
    )
    return float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout)


def percentile_ms(values_s: list[float], share: float) -> float:
    """The value below which `share` of the values lie, in milliseconds."""
    return round(sorted(values_s)[min(len(values_s) - 1, int(share * len(values_s)))] * 1000, 2)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def server(request: pytest.FixtureRequest) -> Iterator[BenchServer]:
    with tempfile.TemporaryDirectory() as name:
        write_gpt2_folder(Path(name))
        running = start_server(Path(name), request.param)
        yield running
        running.process.terminate()
        running.process.wait(30)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_streamed_completions(benchmark: Any, server: BenchServer, concurrency: int) -> None:
    num_requests = {1: 2, 8: 16, 32: 32}[concurrency]
    bandwidth = read_bandwidth_bytes_per_s()
    asyncio.run(run_load(server, min(concurrency, 2), 2))  # warm-up
    runs: list[tuple[float, list[StreamTimes]]] = []
    benchmark.pedantic(
        lambda: runs.append(asyncio.run(run_load(server, concurrency, num_requests))), rounds=3, iterations=1
    )
    seconds = statistics.median(run[0] for run in runs)
    streams = [times.arrivals_s for run in runs for times in run[1]]
    gaps = [b - a for arrivals in streams for a, b in itertools.pairwise(arrivals)]
    tokens_per_s = num_requests * NUM_OUTPUT_TOKENS / seconds
    weight_bytes = NUM_WEIGHTS * (2 if server.dtype == "bfloat16" else 4)
    benchmark.extra_info.update(
        dtype=server.dtype,
        tokens_per_s=round(tokens_per_s, 1),
        ttft_ms_p50=percentile_ms([arrivals[0] for arrivals in streams], 0.5),
        ttft_ms_p99=percentile_ms([arrivals[0] for arrivals in streams], 0.99),
        itl_ms_p50=percentile_ms(gaps, 0.5),
        itl_ms_p99=percentile_ms(gaps, 0.99),
        share_of_bandwidth_limit=round(tokens_per_s / concurrency * weight_bytes / bandwidth, 3),
        start_s=round(server.start_s, 2),
        api_process_mib=round(server.api_process_mib(), 1),
    )


def test_start_to_ready(benchmark: Any) -> None:
    """Seconds from the command to the ready line, GPT-2's shape with random weights."""
    with tempfile.TemporaryDirectory() as name:
        write_gpt2_folder(Path(name))

        def start_and_stop() -> None:
            server = start_server(Path(name), "float32")
            with urllib.request.urlopen(f"http://{server.host}:{server.port}/health", timeout=5) as response:
                benchmark.extra_info["health"] = response.status
            starts.append(server.start_s)
            server.process.terminate()
            server.process.wait(30)

        starts: list[float] = []
        benchmark.pedantic(start_and_stop, rounds=3, iterations=1)
        benchmark.extra_info["start_s_median"] = round(statistics.median(starts), 2)
        benchmark.extra_info["cores"] = os.cpu_count()
