"""Processor time of the load generator per token, beside what another HTTP client and event loop would take."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmstack_bench import event_loop
from llmstack_bench.client import CompletionClient, RequestOptions
from llmstack_bench.load import run_load
from llmstack_bench.result import RequestResult
from llmstack_bench.stream import EventLines, StreamRecorder
from llmstack_bench.workload import RandomWorkload

NUM_REQUESTS, NUM_TOKENS, CONCURRENCY = 64, 128, 32
OPTIONS = RequestOptions()
BODIES = [OPTIONS.encode(request, "m") for request in RandomWorkload(NUM_REQUESTS, 128, NUM_TOKENS).requests()]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, str(Path(__file__).with_name("token_server.py")), str(NUM_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.terminate()


async def with_aiohttp(url: str) -> float:
    """Our client; processor seconds."""
    async with CompletionClient(url, OPTIONS) as client:
        load = await run_load(client, BODIES, [0.0] * NUM_REQUESTS, max_concurrency=CONCURRENCY)
    assert all(result.error is None and result.num_output_tokens == NUM_TOKENS for result in load.results)
    return load.generator_cpu_s


async def with_httpx(url: str) -> float:
    """The same load and the same parser over httpx."""
    gate, started_s = asyncio.Semaphore(CONCURRENCY), time.process_time()

    async def send(client: httpx.AsyncClient, body: bytes) -> RequestResult:
        result, lines = RequestResult(), EventLines()
        recorder = StreamRecorder(result, time.perf_counter())
        headers = {"Content-Type": "application/json"}
        async with gate, client.stream("POST", f"{url}/v1/completions", content=body, headers=headers) as response:
            async for data in response.aiter_raw():
                for payload in lines.feed(data):
                    recorder.take(payload, time.perf_counter())
        recorder.close()
        return result

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        results = await asyncio.gather(*(send(client, body) for body in BODIES))
    assert all(result.num_output_tokens == NUM_TOKENS for result in results)
    return time.process_time() - started_s


@pytest.mark.parametrize("run", [event_loop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("load", [with_aiohttp, with_httpx])
def test_processor_time_per_token(
    benchmark: Any, url: str, load: Callable[[str], Coroutine[Any, Any, float]], run: Callable[..., float]
) -> None:
    seconds: list[float] = []
    benchmark.pedantic(lambda: seconds.append(run(load(url))), rounds=3, iterations=1)
    benchmark.extra_info["cpu_us_per_token"] = round(min(seconds) / NUM_REQUESTS / NUM_TOKENS * 1e6, 1)
