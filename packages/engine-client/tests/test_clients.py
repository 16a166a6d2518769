"""The three clients: alike in what they return, and in how they report an engine core's end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from llmstack_engine_client import AsyncMPClient, InprocClient, SyncMPClient
from llmstack_engine_core import EngineConfig
from llmstack_types import (
    Control,
    EngineCoreRequest,
    EngineDeadError,
    EngineStartError,
    InvalidRequestError,
    ModelRunnerConfig,
    SamplingParams,
)

SYNC_CLIENTS = pytest.mark.parametrize("client_class", [InprocClient, SyncMPClient])


def config(options: str = "", **changes: Any) -> EngineConfig:
    values = {"runner": "echo", "log_level": "CRITICAL", "shutdown_grace_s": 3.0, **changes}
    return EngineConfig(ModelRunnerConfig(f"echo?{options}"), **values)


def request(request_id: str, max_tokens: int = 4) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [5, 6, 7], SamplingParams(max_tokens=max_tokens, seed=0))


def run(client: InprocClient | SyncMPClient, num_requests: int) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    num_finished = 0
    while num_finished < num_requests:
        for output in client.get_outputs().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            num_finished += output.finish_reason is not None
    return tokens


def is_gone(client: SyncMPClient | AsyncMPClient, directory: Path) -> bool:
    return not Path(f"/proc/{client.pid}").exists() and not directory.exists()


@SYNC_CLIENTS
def test_a_sync_client_returns_the_tokens_of_every_request(client_class: type) -> None:
    client = client_class(config())
    ready = client.wait_until_ready()
    assert ready.num_blocks > 0
    assert client.wait_until_ready() == ready
    for index in range(20):
        client.add_request(request(f"r{index}", max_tokens=1 + index))
    with pytest.raises(InvalidRequestError, match="in use"):
        client.add_request(request("r19"))
    tokens = run(client, 20)
    assert tokens == {f"r{index}": [5 + place % 3 for place in range(1 + index)] for index in range(20)}
    assert client.call(Control.RESET_PREFIX_CACHE)
    assert not client.is_dead
    client.shutdown()
    client.shutdown()
    with pytest.raises(EngineDeadError):
        client.add_request(request("late"))
    client.abort_requests(["late"])
    assert client.is_dead


@SYNC_CLIENTS
def test_an_aborted_request_ends_and_its_id_is_free_again(client_class: type) -> None:
    client = client_class(config("step_delay_s=0.02"))
    client.wait_until_ready()
    client.add_request(request("r", max_tokens=2000))
    client.get_outputs()
    client.abort_requests(["r", "unknown"])
    client.add_request(request("other", max_tokens=2))
    assert run(client, 1)["other"] == [5, 6]
    client.add_request(request("r", max_tokens=2))
    assert run(client, 1)["r"][-2:] == [5, 6]
    client.shutdown()


@SYNC_CLIENTS
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"runner": "nonesuch"}, "there is no model runner 'nonesuch'"),
        ({"options": "load_error=the+model+is+odd"}, "the model is odd"),
        ({"options": "num_available_blocks=0"}, "one block"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(client_class: type, changes: dict[str, str], part: str) -> None:
    client = client_class(config(**changes))
    with pytest.raises(EngineStartError) as caught:
        client.wait_until_ready()
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    client.shutdown()


@SYNC_CLIENTS
def test_a_failed_step_ends_the_engine_core_for_its_client(client_class: type) -> None:
    client = client_class(config("fail_at_step=2"))
    client.wait_until_ready()
    client.add_request(request("r"))
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        run(client, 1)
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        client.get_outputs()
    assert client.is_dead
    client.shutdown()


def test_a_constructor_returns_before_the_model_has_loaded_and_shutdown_may_come_first() -> None:
    client = SyncMPClient(config("load_delay_s=60"))
    directory = client._process.directory
    client.shutdown()
    assert is_gone(client, directory)


def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing() -> None:
    client = SyncMPClient(config("load_delay_s=60", start_timeout_s=0.3))
    directory = client._process.directory
    with pytest.raises(EngineStartError, match=r"not ready within 0\.3 s"):
        client.wait_until_ready()
    assert is_gone(client, directory)


def test_a_killed_engine_core_is_noticed_by_a_waiting_sync_client() -> None:
    client = SyncMPClient(config("step_delay_s=60"))
    client.wait_until_ready()
    client.add_request(request("r"))
    threading.Timer(0.1, os.kill, (client.pid, signal.SIGKILL)).start()
    start_s = time.monotonic()
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        client.get_outputs()
    print(f"noticed after {time.monotonic() - start_s - 0.1:.3f} s")
    directory = client._process.directory
    client.shutdown()
    assert is_gone(client, directory)


def test_a_process_that_ends_while_loading_is_a_start_error() -> None:
    client = SyncMPClient(config("load_delay_s=60"))
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineStartError, match="killed by SIGKILL"):
        client.wait_until_ready()


def test_a_request_that_cannot_be_encoded_is_not_in_flight_afterwards() -> None:
    client = SyncMPClient(config())
    client.wait_until_ready()
    with pytest.raises(ValueError, match="prompt_token_ids"):
        client.add_request(EngineCoreRequest("r", [-1], SamplingParams(max_tokens=2, seed=0)))
    client.add_request(request("r"))
    assert run(client, 1)["r"] == [5, 6, 7, 5]
    client.shutdown()


async def use_async_client(client: AsyncMPClient) -> dict[str, list[int]]:
    await client.wait_until_ready()
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
    assert await client.call(Control.RESET_PREFIX_CACHE)
    assert (await client.call(Control.STATS)).num_running == 0
    await asyncio.gather(client.shutdown(), client.shutdown())
    await client.shutdown()
    with pytest.raises(EngineDeadError):
        await client.add_request(request("late"))
    await client.abort_requests(["late"])
    return tokens


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_async_client_made_outside_a_loop_works_under_asyncio_and_uvloop(loop_factory: Any) -> None:
    client = AsyncMPClient(config("step_delay_s=0.01"))  # the last request still runs when its id comes again
    directory = client._process.directory
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        tokens = runner.run(use_async_client(client))
    assert tokens == {f"r{index}": [5 + place % 3 for place in range(1 + index)] for index in range(20)}
    assert is_gone(client, directory)


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_killed_engine_core_is_noticed_by_everyone_who_waits(loop_factory: Any) -> None:
    async def scenario() -> None:
        client = AsyncMPClient(config())
        directory = client._process.directory
        await client.wait_until_ready()
        os.kill(client.pid, signal.SIGSTOP)  # so that nothing is answered
        await client.add_request(request("r"))
        waiting = [
            asyncio.ensure_future(client.get_outputs()),
            asyncio.ensure_future(client.call(Control.RESET_PREFIX_CACHE)),
        ]
        await asyncio.sleep(0.1)
        os.kill(client.pid, signal.SIGKILL)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "SIGKILL" in str(result)
        assert client.is_dead
        await client.abort_requests(["r"])
        await client.shutdown()
        assert is_gone(client, directory)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())


async def test_an_async_start_that_fails_says_why_and_leaves_nothing() -> None:
    for changes, part in (
        ({"runner": "nonesuch"}, "there is no model runner"),
        ({"options": "load_delay_s=60", "start_timeout_s": 0.3}, "not ready within"),
    ):
        client = AsyncMPClient(config(**changes))
        directory = client._process.directory
        with pytest.raises(EngineStartError, match=part):
            await client.wait_until_ready()
        assert is_gone(client, directory)


async def read_endlessly(client: AsyncMPClient) -> None:
    while True:
        await client.get_outputs()


async def test_an_async_client_learns_of_a_failed_step_and_of_a_process_that_just_exits() -> None:
    for options, part in (("fail_at_step=2", "RuntimeError"), ("exit_at_step=2", "exit status 3")):
        client = AsyncMPClient(config(options))
        await client.wait_until_ready()
        await client.add_request(request("r"))
        with pytest.raises(EngineDeadError, match=part):
            await read_endlessly(client)
        await client.shutdown()


async def test_a_cancelled_wait_loses_no_outputs() -> None:
    client = AsyncMPClient(config("step_delay_s=0.05"))
    await client.wait_until_ready()
    await client.add_request(request("r", max_tokens=5))
    tokens: list[int] = []
    while len(tokens) < 5:
        try:
            outputs = await asyncio.wait_for(client.get_outputs(), 0.02)
        except TimeoutError:
            continue
        for output in outputs.outputs:
            tokens += output.new_token_ids
    assert tokens == [5, 6, 7, 5, 6]
    await client.shutdown()


async def test_an_abort_reaches_a_busy_engine_core_within_a_step() -> None:
    client = AsyncMPClient(config())
    await client.wait_until_ready()
    await client.add_request(request("r", max_tokens=2000))
    await client.get_outputs()
    await client.abort_requests(["r"])
    stats = await client.call(Control.STATS)
    assert stats.num_running <= 1
    await client.add_request(request("next", max_tokens=1))
    seen: list[str] = []
    while "next" not in seen:
        seen += [output.request_id for output in (await client.get_outputs()).outputs]
    assert seen[-1] == "next"
    assert (await client.call(Control.STATS)).num_free_blocks == (await client.wait_until_ready()).num_blocks
    await client.shutdown()


def test_a_fork_is_refused_and_ends_nothing_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SyncMPClient(config())
    client.wait_until_ready()
    with monkeypatch.context() as fork:
        fork.setattr("llmstack_engine_client.clients.sync_mp.os.getpid", lambda: -1)
        for refused in (
            lambda: client.add_request(request("a")),
            lambda: client.call(Control.RESET_PREFIX_CACHE),
            client.get_outputs,
        ):
            with pytest.raises(EngineDeadError, match="fork"):
                refused()
        client.shutdown()
    client.add_request(request("b"))
    assert run(client, 1) == {"b": [5, 6, 7, 5]}
    client.shutdown()
