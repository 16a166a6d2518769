"""Clients of an engine core that another process runs: several at once, coming and going."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_core_helpers.ports import free_address

from llmstack_engine_client import (
    AsyncAttachedClient,
    AsyncInprocClient,
    AsyncMPClient,
    RecoveringClient,
    attach_async_client,
)
from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.processes.launcher import launch_engine_process, relaunch_engine_process
from llmstack_engine_client.processes.supervisor import EngineProcess
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_engine_core.ipc.link import Link
from llmstack_types import (
    Control,
    EngineCoreRequest,
    EngineDeadError,
    EngineStartError,
    FinishReason,
    InvalidRequestError,
    ModelRunnerConfig,
    SamplingParams,
)


def config(options: str = "", **changes: Any) -> EngineConfig:
    return EngineConfig(
        ModelRunnerConfig(f"echo?{options}"), runner="echo", log_level="CRITICAL", shutdown_grace_s=3.0, **changes
    )


def request(request_id: str, max_tokens: int = 4) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [5, 6, 7], SamplingParams(max_tokens=max_tokens, seed=0))


async def tokens_of(client: AsyncClient, request_id: str) -> list[int]:
    """The tokens of one request; outputs of others may still be on their way."""
    tokens: list[int] = []
    while True:
        for output in (await client.get_outputs()).outputs:
            if output.request_id == request_id:
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens


async def read_endlessly(client: AsyncClient) -> None:
    while True:
        await client.get_outputs()


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    process = launch_engine_process(config("step_delay_s=0.002"))
    yield process
    process.stop()


async def test_clients_share_an_engine_core_and_get_their_own_outputs(process: EngineProcess) -> None:
    clients = [AsyncAttachedClient(process.address, index) for index in range(3)]
    await asyncio.gather(*(client.wait_until_ready() for client in clients))
    for index, client in enumerate(clients):
        await client.add_request(request(f"r{index}", max_tokens=20))
    texts = await asyncio.gather(*(tokens_of(client, f"r{index}") for index, client in enumerate(clients)))
    assert all(client.num_requests == 0 for client in clients)
    assert texts == [[5 + place % 3 for place in range(20)]] * 3
    for client in clients:
        await client.shutdown()
    assert process.is_alive


async def test_clients_of_an_engine_core_that_crashes_go_on_with_the_next_one() -> None:
    engine = launch_engine_process(config("step_delay_s=0.02"))
    options = {"start_timeout_s": 30.0, "max_restarts": 2}
    clients = [attach_async_client([engine.address], client_index=index, **options) for index in range(2)]
    await asyncio.gather(*(client.wait_until_ready() for client in clients))
    reading = []
    for index, client in enumerate(clients):
        await client.add_request(request(f"r{index}", max_tokens=50))
        reading.append(asyncio.ensure_future(tokens_of(client, f"r{index}")))
    await clients[0].call(Control.STATS)
    os.kill(engine.pid, signal.SIGKILL)
    other = relaunch_engine_process(config("step_delay_s=0.02"), engine)
    assert other.address == engine.address
    assert await asyncio.gather(*reading) == [[5 + place % 3 for place in range(50)]] * 2
    assert [client.num_restarts for client in clients] == [1, 1]
    assert {ready.pid for client in clients for ready in client.engines} == {other.pid}
    ending = [asyncio.ensure_future(read_endlessly(client)) for client in clients]
    other.terminate()
    for task in ending:  # it was asked to end: there will be no other one
        with pytest.raises(EngineDeadError, match="has been stopped"):
            await task
    for client in clients:
        await client.shutdown()
    other.stop()
    assert not other.directory.exists()


@pytest.mark.full
async def test_a_request_that_kills_a_shared_engine_core_is_found_and_no_other() -> None:
    settings = config("deadly_token_id=666")
    engine = launch_engine_process(settings)
    options = {"start_timeout_s": 30.0, "max_restarts": 5}
    clients = [attach_async_client([engine.address], client_index=index, **options) for index in range(2)]
    await asyncio.gather(*(client.wait_until_ready() for client in clients))

    async def supervise() -> None:
        nonlocal engine
        while True:
            await asyncio.sleep(0.02)
            if not engine.is_alive:
                engine = relaunch_engine_process(settings, engine)

    supervising = asyncio.ensure_future(supervise())
    ends: dict[str, FinishReason] = {}

    async def read(client: RecoveringClient, num_ended: int) -> None:
        while num_ended:
            for output in (await client.get_outputs()).outputs:
                if output.finish_reason is not None:
                    ends[output.request_id] = output.finish_reason
                    num_ended -= 1

    for index, client in enumerate(clients):
        for number in range(3):
            await client.add_request(request(f"good{index}{number}", max_tokens=20))
    await clients[1].add_request(replace(request("bad"), prompt_token_ids=[1, 666]))
    async with asyncio.timeout(90):
        await asyncio.gather(read(clients[0], 3), read(clients[1], 4))
    assert ends.pop("bad") is FinishReason.ERROR
    assert set(ends.values()) == {FinishReason.LENGTH}
    supervising.cancel()
    for client in clients:
        await client.shutdown()
    engine.stop()


async def test_a_client_that_leaves_ends_its_own_requests_only(process: EngineProcess) -> None:
    leaving, staying = AsyncAttachedClient(process.address, 0), AsyncAttachedClient(process.address, 1)
    await asyncio.gather(leaving.wait_until_ready(), staying.wait_until_ready())
    await leaving.add_request(request("gone", max_tokens=30_000))
    await leaving.get_outputs()
    await staying.add_request(request("here", max_tokens=50))
    await leaving.shutdown()
    assert len(await tokens_of(staying, "here")) == 50
    num_running = 1
    while num_running:
        num_running = (await staying.call(Control.STATS)).num_running
    await staying.shutdown()


async def test_a_client_without_requests_receives_the_load_of_every_step_up_to_the_last(
    process: EngineProcess,
) -> None:
    busy, idle = AsyncAttachedClient(process.address, 1), AsyncAttachedClient(process.address, 0)
    await asyncio.gather(busy.wait_until_ready(), idle.wait_until_ready())
    await busy.add_request(request("r", max_tokens=20))
    await tokens_of(busy, "r")
    steps, num_running = [], 1
    while num_running:
        stats = (await idle.get_outputs()).scheduler_stats
        assert stats is not None
        steps.append(stats.step)
        num_running = stats.num_running
    assert steps == list(range(1, len(steps) + 1))  # the first client by index sees each
    await asyncio.gather(busy.shutdown(), idle.shutdown())


async def test_the_end_of_the_engine_core_is_noticed_by_all() -> None:
    process = launch_engine_process(config("step_delay_s=60"))
    clients = [AsyncAttachedClient(process.address, index) for index in range(2)]
    await asyncio.gather(*(client.wait_until_ready() for client in clients))
    await clients[0].add_request(request("r"))
    waiting = [asyncio.ensure_future(client.get_outputs()) for client in clients]
    await asyncio.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, EngineDeadError)
        assert process.address in str(result)
    for client in clients:
        assert client.is_dead
        await client.shutdown()
        await client.shutdown()
    process.stop()


async def test_all_clients_learn_why_it_could_not_start() -> None:
    process = launch_engine_process(config("load_delay_s=0.3&load_error=the+model+is+odd"))
    clients = [AsyncAttachedClient(process.address, index) for index in range(3)]
    results = await asyncio.gather(*(client.wait_until_ready() for client in clients), return_exceptions=True)
    assert [str(result) for result in results] == ["the model is odd"] * 3
    process.stop()


async def test_an_address_without_an_engine_core_is_a_start_error(tmp_path: Path) -> None:
    client = attach_async_client([f"ipc://{tmp_path}/engine.sock"], start_timeout_s=0.2)
    with pytest.raises(EngineStartError, match="not ready within"):
        await client.wait_until_ready()
    with pytest.raises(EngineStartError, match="listens on 127"):
        attach_async_client(["tcp://0.0.0.0:1"], start_timeout_s=0.2)


async def test_a_port_of_the_loopback_interface_serves_those_with_the_key(tmp_path: Path) -> None:
    key_file, other_key_file = tmp_path / "keys", tmp_path / "other keys"
    make_key_file(key_file)
    make_key_file(other_key_file)
    address = free_address()
    process = launch_engine_process(config(key_file=str(key_file)), address)
    client = AsyncAttachedClient(address, link=Link(str(key_file)))
    await client.wait_until_ready()
    await client.add_request(request("r"))
    assert await tokens_of(client, "r") == [5, 6, 7, 5]
    await client.shutdown()
    stranger = AsyncAttachedClient(address, start_timeout_s=0.5, link=Link(str(other_key_file)))
    with pytest.raises(EngineStartError):
        await stranger.wait_until_ready()
    with pytest.raises(EngineStartError, match="needs --engine-key-file"):
        AsyncAttachedClient(address)
    process.stop()


async def test_all_clients_learn_that_the_engine_core_sleeps(process: EngineProcess) -> None:
    first, second = AsyncAttachedClient(process.address, 0), AsyncAttachedClient(process.address, 1)
    await asyncio.gather(first.wait_until_ready(), second.wait_until_ready())
    await second.add_request(request("r", max_tokens=2000))
    await second.get_outputs()
    assert not await first.call(Control.SLEEP, 1)
    await second.abort_requests(["r"])
    assert await second.call(Control.SLEEP, 2)
    late = AsyncAttachedClient(process.address, 2)
    await late.wait_until_ready()
    await first.call(Control.STATS)  # what was sent before has come by then
    await late.call(Control.STATS)
    assert [client.sleep_level for client in (first, second, late)] == [2, 2, 2]
    await first.call(Control.WAKE_UP)
    await second.call(Control.STATS)
    assert [client.sleep_level for client in (first, second)] == [0, 0]
    await second.add_request(request("again"))
    assert await tokens_of(second, "again") == [5, 6, 7, 5]
    await asyncio.gather(first.shutdown(), second.shutdown(), late.shutdown())


@pytest.mark.parametrize("client_class", [AsyncInprocClient, AsyncMPClient])
async def test_a_thread_does_what_a_process_does(client_class: type[AsyncInprocClient]) -> None:
    client = client_class(config())
    assert (await client.wait_until_ready()).num_blocks > 0
    for index in range(20):
        await client.add_request(request(f"r{index}", max_tokens=1 + index))
    with pytest.raises(InvalidRequestError):
        await client.add_request(request("r19"))
    tokens: dict[str, list[int]] = {}
    num_finished = 0
    while num_finished < 20:
        for output in (await client.get_outputs()).outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            num_finished += output.finish_reason is not None
    assert tokens == {f"r{index}": [5 + place % 3 for place in range(1 + index)] for index in range(20)}
    await client.add_request(request("aborted", max_tokens=2000))
    await client.abort_requests(["aborted"])
    assert await client.call(Control.RESET_PREFIX_CACHE)
    assert (await client.call(Control.RECENT_STEPS, 0)).steps
    assert await client.call(Control.SLEEP, 1)
    await client.call(Control.WAKE_UP)
    assert not client.is_dead
    await asyncio.gather(client.shutdown(), client.shutdown())
    with pytest.raises(EngineDeadError):
        await client.add_request(request("late"))


async def test_a_thread_that_cannot_start_or_fails_says_so_in_one_line() -> None:
    for options, changes, part in (
        ("load_error=the+model+is+odd", {}, "the model is odd"),
        ("load_delay_s=2", {"start_timeout_s": 0.1, "shutdown_grace_s": 0.1}, "not ready within"),
    ):
        starting = AsyncInprocClient(
            EngineConfig(ModelRunnerConfig(f"echo?{options}"), runner="echo", **changes)  # type: ignore[arg-type]
        )
        with pytest.raises(EngineStartError, match=part):
            await starting.wait_until_ready()
    client = AsyncInprocClient(config("fail_at_step=2"))
    await client.wait_until_ready()
    await client.add_request(request("r"))
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        await read_endlessly(client)
    await client.shutdown()


def test_a_thread_may_be_started_before_there_is_a_loop() -> None:
    client = AsyncInprocClient(config())

    async def use() -> list[int]:
        await client.wait_until_ready()
        await client.add_request(request("r"))
        tokens = await tokens_of(client, "r")
        await client.shutdown()
        return tokens

    assert asyncio.run(use()) == [5, 6, 7, 5]
