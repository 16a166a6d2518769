"""One request of one token, there and back, over an engine core that only echoes: what processes and sockets add."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from llmstack_engine_client import AsyncMPClient, InprocClient, SyncMPClient
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.ipc.sockets import connect_client_socket
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, ENGINE_MESSAGES, Hello
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, ModelRunnerConfig, SamplingParams

CONFIG = EngineConfig(ModelRunnerConfig("echo"), runner="echo", log_stats=False, log_level="WARNING")
PARAMS = SamplingParams(max_tokens=1, seed=0)
PROMPT = list(range(16))
LOOPS = pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def requests() -> Iterator[EngineCoreRequest]:
    return (EngineCoreRequest(f"r{index}", PROMPT, PARAMS) for index in count())


@pytest.mark.benchmark(group="round trip")
@pytest.mark.parametrize("client_class", [InprocClient, SyncMPClient])
def test_sync_round_trip(benchmark: Any, client_class: type) -> None:
    client, each = client_class(CONFIG), requests()
    client.wait_until_ready()

    def round_trip() -> None:
        client.add_request(next(each))
        while not client.get_outputs().outputs:
            pass

    benchmark.pedantic(round_trip, iterations=20, rounds=100, warmup_rounds=5)
    client.shutdown()


@pytest.mark.benchmark(group="round trip")
@LOOPS
def test_async_round_trip(benchmark: Any, loop_factory: Any) -> None:
    client, each = AsyncMPClient(CONFIG), requests()

    async def round_trips() -> None:
        for _ in range(20):
            await client.add_request(next(each))
            while not (await client.get_outputs()).outputs:
                pass

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(client.wait_until_ready())
        benchmark.pedantic(lambda: runner.run(round_trips()), rounds=100, warmup_rounds=5)
        benchmark.extra_info["us_per_message"] = round(benchmark.stats.stats.median / 20 * 1e6, 1)
        runner.run(client.shutdown())


@pytest.mark.benchmark(group="round trip")
@LOOPS
def test_zmq_asyncio_round_trip(benchmark: Any, loop_factory: Any) -> None:
    """The way not taken: the same messages through `zmq.asyncio`."""
    process, each = launch_engine_process(CONFIG), requests()
    context = zmq.Context()
    plain = connect_client_socket(context, process.directory, client_index=0)

    async def receive(socket: Any, kind: type) -> Any:
        while not isinstance(message := ENGINE_MESSAGES.decode(await socket.recv())[1], kind):
            pass
        return message

    async def round_trips(socket: Any) -> None:
        for _ in range(20):
            await socket.send(CLIENT_MESSAGES.encode(next(each)))
            while not (await receive(socket, EngineCoreOutputs)).outputs:
                pass

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        socket = zmq.asyncio.Socket.from_socket(plain)
        plain.send(CLIENT_MESSAGES.encode(Hello()))
        plain.poll(30_000)
        plain.recv()
        benchmark.pedantic(lambda: runner.run(round_trips(socket)), rounds=100, warmup_rounds=5)
        benchmark.extra_info["us_per_message"] = round(benchmark.stats.stats.median / 20 * 1e6, 1)
        socket.close()
    process.stop()
    plain.close()
    context.term()


@pytest.mark.benchmark(group="start")
def test_start_and_stop(benchmark: Any) -> None:
    def start_and_stop() -> None:
        client = SyncMPClient(CONFIG)
        client.wait_until_ready()
        client.shutdown()

    benchmark.pedantic(start_and_stop, rounds=10)
