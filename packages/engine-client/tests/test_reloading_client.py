"""An engine core is exchanged for another one while requests run; none is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from llmstack_engine_client import ReloadingClient, make_async_client
from llmstack_engine_core import EngineConfig
from llmstack_types import (
    Control,
    EngineCoreRequest,
    EngineStartError,
    FinishReason,
    ModelRunnerConfig,
    SamplingParams,
)

PROMPT = (5, 6, 7)


def config(options: str, **changes: Any) -> EngineConfig:
    values = {"runner": "echo", "log_level": "CRITICAL", "shutdown_grace_s": 3.0, "max_restarts": 3, **changes}
    return EngineConfig(ModelRunnerConfig(f"echo?{options}"), **values)


def reloading(options: str) -> ReloadingClient:
    client = make_async_client(config(options), can_reload=True)
    assert isinstance(client, ReloadingClient)
    return client


def request(request_id: str, max_tokens: int, fork_of: str = "") -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return EngineCoreRequest(request_id, list(PROMPT), params, fork_of=fork_of)


def echo(num_tokens: int) -> list[int]:
    return [PROMPT[index % len(PROMPT)] for index in range(num_tokens)]


def no_adapters() -> list[tuple[str, str]]:
    return []


class Reader:
    """The tokens and ends that came, and the names of the weights that they came from, by request."""

    def __init__(self, client: ReloadingClient) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.weights: dict[str, list[str]] = {}
        self._client = client

    async def read_until(self, is_over: Any) -> None:
        async with asyncio.timeout(60):
            while not is_over():
                outputs = await self._client.get_outputs()
                for output in outputs.outputs:
                    assert outputs.engine is not None
                    names = self.weights.setdefault(output.request_id, [])
                    if outputs.engine.weights_name not in names[-1:]:
                        names.append(outputs.engine.weights_name)
                    self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                    if output.finish_reason is not None:
                        assert output.request_id not in self.ends
                        self.ends[output.request_id] = output.finish_reason


async def wait_for_one(client: ReloadingClient) -> None:
    """Returns when there is one engine core again; a server reads outputs at all times."""
    reading = asyncio.create_task(client.get_outputs())
    async with asyncio.timeout(30):
        while client.is_reloading:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
    reading.cancel()


async def test_requests_finish_in_the_old_engine_core_and_new_ones_go_to_the_next() -> None:
    client = reloading("step_delay_s=0.01&vocab_size=100")
    reader = Reader(client)
    try:
        first_pid = (await client.wait_until_ready()).pid
        await client.add_request(request("old", 200))
        await reader.read_until(lambda: reader.tokens.get("old"))
        os.kill(first_pid, signal.SIGSTOP)  # its requests end after all others
        next_config = config("vocab_size=200", weights_name="next")
        assert (await client.prepare(next_config, no_adapters)).vocab_size == 200
        await client.add_request(request("between", 200))
        client.switch()
        assert client.engines[0].vocab_size == 200
        await client.add_request(request("new", 30))
        await client.add_request(request("fork", 30, fork_of="between"))
        assert client.num_finishing == 3
        await reader.read_until(lambda: reader.ends)
        assert list(reader.ends) == ["new"]
        os.kill(first_pid, signal.SIGCONT)
        await reader.read_until(lambda: len(reader.ends) == 4)
        lengths = {"old": 200, "between": 200, "new": 30, "fork": 30}
        assert reader.tokens == {name: echo(length) for name, length in lengths.items()}
        assert reader.weights == {"old": ["start"], "between": ["start"], "fork": ["start"], "new": ["next"]}
        await wait_for_one(client)
        with pytest.raises(ProcessLookupError):
            os.kill(first_pid, 0)
        assert (client.num_requests, client.num_restarts) == (0, 0)
    finally:
        await client.shutdown()


async def test_a_crash_of_the_old_engine_core_after_a_reload_loses_no_request() -> None:
    client = reloading("step_delay_s=0.02")
    reader = Reader(client)
    try:
        first_pid = (await client.wait_until_ready()).pid
        await client.add_request(request("old", 100))
        await reader.read_until(lambda: reader.tokens.get("old"))
        os.kill(first_pid, signal.SIGSTOP)
        await client.prepare(config(""), no_adapters)
        client.switch()
        assert client.num_finishing == 1
        assert not await client.call(Control.SLEEP, 1)
        with pytest.raises(EngineStartError, match="has ended"):
            client.switch()
        with pytest.raises(EngineStartError, match="has not ended yet"):
            await client.prepare(config(""), no_adapters)
        os.kill(first_pid, signal.SIGKILL)
        await reader.read_until(lambda: reader.ends)
        assert reader.tokens == {"old": echo(100)}
        await wait_for_one(client)
        assert client.num_restarts == 1
    finally:
        await client.shutdown()
    with pytest.raises(EngineStartError):
        await client.prepare(config(""), no_adapters)


async def test_requests_move_at_a_token_where_the_next_engine_core_computes_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("weights")
    (tmp_path / "other").write_text("other weights")
    client = reloading(f"step_delay_s=0.05&weights_file={tmp_path / 'first'}")
    reader = Reader(client)
    try:
        first_pid = (await client.wait_until_ready()).pid
        for index in range(4):
            await client.add_request(request(f"r{index}", 50))
        beams = SamplingParams(max_tokens=4, n=2, use_beam_search=True, seed=0)
        await client.add_request(EngineCoreRequest("b0", [5, 6, 7], beams))
        await client.add_request(EngineCoreRequest("b1", [5, 6, 7], beams, fork_of="b0"))
        await reader.read_until(lambda: all(len(reader.tokens.get(f"r{index}", ())) > 2 for index in range(4)))
        os.kill(first_pid, signal.SIGSTOP)
        in_flight = client.num_requests

        await client.prepare(config(f"weights_file={tmp_path / 'other'}"), no_adapters)
        with pytest.raises(EngineStartError, match="numeric contract is another one"):
            client.switch(moves=True)
        await client.drop()
        assert client.num_requests == in_flight

        changes = {"enable_prefix_caching": False, "weights_name": "plain"}
        await client.prepare(config(f"weights_file={tmp_path / 'first'}", **changes), no_adapters)
        assert client.switch(moves=True) == in_flight
        assert client.num_finishing == 0
        await client.abort_requests(["r3"])
        os.kill(first_pid, signal.SIGCONT)
        await reader.read_until(lambda: {"r0", "r1", "r2", "b0", "b1"} <= reader.ends.keys())
        assert [reader.tokens[f"r{index}"] for index in range(3)] == [echo(50)] * 3
        assert "r3" not in reader.ends
        assert [reader.weights[f"r{index}"] for index in range(3)] == [["start", "plain"]] * 3
        await wait_for_one(client)
        assert (client.num_requests, client.num_restarts) == (0, 0)
        with pytest.raises(ProcessLookupError):
            os.kill(first_pid, 0)
    finally:
        await client.shutdown()


async def test_without_room_for_two_new_requests_wait_and_a_failure_restores_the_old_weights() -> None:
    client = reloading("step_delay_s=0.03&vocab_size=100")
    reader = Reader(client)
    try:
        first_pid = (await client.wait_until_ready()).pid
        await client.add_request(request("old", 30))
        await reader.read_until(lambda: reader.tokens.get("old"))
        reading = asyncio.create_task(reader.read_until(lambda: {"old", "new", "last"} <= reader.ends.keys()))
        failing = asyncio.create_task(
            client.exchange(config("load_error=no such weights"), no_adapters, lambda _: None)
        )
        await asyncio.sleep(0)
        assert client.is_recovering
        await client.add_request(request("fork", 30, fork_of="old"))
        await client.add_request(request("new", 20))
        await client.add_request(request("aborted", 20))
        await client.abort_requests(["aborted"])
        assert "new" not in reader.tokens
        with pytest.raises(EngineStartError, match="no such weights"):
            await failing
        assert (client.engines[0].vocab_size, client.engines[0].pid != first_pid) == (100, True)

        done = await client.exchange(config("vocab_size=200", weights_name="next"), no_adapters, lambda _: None)
        assert (done.vocab_size, client.engines[0].vocab_size) == (200, 200)
        await client.add_request(request("last", 10))
        await asyncio.wait_for(reading, 60)
        assert reader.tokens == {"old": echo(30), "fork": echo(30), "new": echo(20), "last": echo(10)}
        assert (reader.weights["new"], reader.weights["last"]) == (["start"], ["next"])
        assert not client.is_reloading
        assert not client.is_dead
    finally:
        await client.shutdown()
