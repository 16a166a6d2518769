"""What a resumable stream costs the API process more than a plain one, without sockets and without an engine.

Requests come as bytes over the server's HTTP protocol, and a transport drops the answers. Outputs are pushed as the
front end of an engine does it. The figures are processor time, medians of turns. Caches are hot, as they
are on no server: there the processor sleeps between two steps. With `--cold` they are emptied before each step. With
`--kept` there is also a server with `--state-dir`; its first steps and the last one wait until the disk has them.

    python packages/api-server/benchmarks/bench_resumable.py
    python packages/api-server/benchmarks/bench_resumable.py --cold
    python packages/api-server/benchmarks/bench_resumable.py --kept
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState as UvicornState

from llmstack_llm import GenerationRequest
from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import CompletionOutput, RequestOutput
from llmstack_llm.outputs.stream import GenerationStream
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.serving.uvicorn_protocol import limited_protocol
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_types import RequestOutputKind

KEYS = ("key-0", "key-1", "key-2", "key-3")  # a key may have 16 resumable answers
RESUMABLE = "x-llmstack-resume: 60\r\n"
NUM_STREAMS = 32
NUM_TOKENS = (2, 100)
NUM_TURNS = 25
CACHE_CONTENT = b"\1" * (16 << 20)  # many times what a core's own caches hold


class PushingEngine(FakeEngineClient):
    """An engine whose outputs come when `step` is called, to all its requests at once."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, tuple[RequestOutputCollector, int]] = {}

    async def submit(self, *requests: GenerationRequest) -> Any:
        request = requests[0]
        prompt = self._admit(request, self._checked(request.sampling))
        collector = RequestOutputCollector(RequestOutputKind.DELTA)
        self.running[request.request_id] = (collector, prompt.sampling_params.max_tokens or 1)
        return GenerationStream([prompt], [request.request_id], collector, self.end)

    def end(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self) -> None:
        for request_id, (collector, num_left) in list(self.running.items()):
            completion = CompletionOutput(0, " token", [7], finish_reason="length" if num_left == 1 else None)
            collector.put(RequestOutput(request_id, "x", [1], outputs=[completion], finished=num_left == 1))
            self.running[request_id] = (collector, num_left - 1)
            if num_left == 1:
                del self.running[request_id]


class DroppingTransport(asyncio.Transport):
    """Takes everything, and notes when an answer is complete."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False

    def write(self, data: Any) -> None:
        self.is_over = self.is_over or data.endswith(b"0\r\n\r\n")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def empty_caches() -> float:
    """Reads much memory; the processor seconds that it took."""
    before_s = time.process_time()
    assert b"\0" not in CACHE_CONTENT
    return time.process_time() - before_s


class Server:
    """The server's application behind its protocol."""

    def __init__(self, is_cold: bool = False, folder: str | None = None) -> None:
        """`folder`: That of `--state-dir`."""
        self._is_cold = is_cold
        self.engine = PushingEngine()
        http = HTTPConfig(api_keys=tuple(map(Secret, KEYS)), state_dir=folder)
        self.state = ready_state(self.engine, http)
        assert self.state.ready is not None
        self.state.ready = replace(self.state.ready, backends={"numeric_contract": "holds"})
        self.state.config = replace(self.state.config, deployment_secret=bytes(32))
        self.config = Config(build_app(self.state), access_log=False, lifespan="off", log_config=None)
        self.config.load()
        self.uvicorn_state = UvicornState()
        self.protocol = limited_protocol(self.state.config.http)
        for begin in self.state.at_ready:
            begin()

    async def stop(self) -> None:
        """Closes its files."""
        for end in self.state.at_end:
            await end()

    async def run(self, num_tokens: int, header: str) -> float:
        """Microseconds for each stream, of streams at once."""
        fields = {"prompt": "hello world", "stream": True, "max_tokens": num_tokens, "temperature": 0}
        body = json.dumps(fields).encode()
        protocols, transports = [], [DroppingTransport() for _ in range(NUM_STREAMS)]
        for transport in transports:
            protocols.append(self.protocol(self.config, self.uvicorn_state, {}))
            protocols[-1].connection_made(transport)
        if self._is_cold:
            empty_caches()
        before_s = time.process_time()
        for index, protocol in enumerate(protocols):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[index % len(KEYS)]}\r\n"
            head += f"{header}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            protocol.data_received(head.encode() + body)
        while len(self.engine.running) < NUM_STREAMS:  # noqa: ASYNC110 (each turn of the loop counts)
            await asyncio.sleep(0)
        num_steps = 0
        while not all(transport.is_over for transport in transports):
            if self._is_cold:
                before_s += empty_caches()
            self.engine.step()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            is_awaited = num_steps < 2 or not self.engine.running
            num_steps += 1
            if self.state.streams.saver is not None and is_awaited:
                await self.state.streams.saver.saved()
        for _ in range(20):  # what is left of the requests
            await asyncio.sleep(0)
        taken_s = time.process_time() - before_s
        for protocol in protocols:
            protocol.connection_lost(None)
        await asyncio.sleep(0)
        return 1e6 * taken_s / NUM_STREAMS


async def measure(
    num_turns: int = NUM_TURNS, is_cold: bool = False, is_kept: bool = False
) -> dict[tuple[str, int], float]:
    """Kind and number of tokens to microseconds per request."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(is_cold)
        kinds = {"plain": (server, ""), "resumable": (server, RESUMABLE)}
        if is_kept:
            kinds["kept"] = (Server(is_cold, folder), RESUMABLE)
        found: dict[tuple[str, int], list[float]] = {}
        for one, header in kinds.values():
            await one.run(4, header)
        gc.collect()
        gc.freeze()
        for _ in range(num_turns):
            for num_tokens in NUM_TOKENS:
                for kind, (one, header) in kinds.items():
                    gc.collect()
                    found.setdefault((kind, num_tokens), []).append(await one.run(num_tokens, header))
        gc.unfreeze()
        for one in {one for one, _ in kinds.values()}:
            await one.stop()
    return {key: median(values) for key, values in found.items()}


@pytest.mark.parametrize("is_cold", [False, True], ids=["hot", "cold"])
def test_resumable(benchmark: Any, is_cold: bool) -> None:
    found: list[dict[tuple[str, int], float]] = []
    benchmark.pedantic(lambda: found.append(asyncio.run(measure(is_cold=is_cold))), rounds=1, iterations=1)
    benchmark.extra_info.update({f"{kind} {size}": round(value, 1) for (kind, size), value in found[0].items()})


def main() -> None:
    """Prints the medians, and what a resumable request and each further token cost more."""
    parser = argparse.ArgumentParser(description="What a resumable stream costs the API process more than a plain one.")
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--cold", action="store_true", help="empty the caches before each step")
    parser.add_argument("--kept", action="store_true", help="also with --state-dir")
    options = parser.parse_args()
    found = asyncio.run(measure(options.turns, options.cold, options.kept))
    few, many = NUM_TOKENS
    for kind in ("resumable", "kept")[: 1 + options.kept]:
        for size in NUM_TOKENS:
            plain, other = found["plain", size], found[kind, size]
            print(f"{size:>4} tokens: {plain:.1f} us plain, {other:.1f} us {kind}, {other / plain:.3f}")
        more = {size: found[kind, size] - found["plain", size] for size in NUM_TOKENS}
        further = (more[many] - more[few]) / (many - few)
        print(f"more: {more[few]:.1f} us per request, {further:.2f} us per further token")


if __name__ == "__main__":
    main()
