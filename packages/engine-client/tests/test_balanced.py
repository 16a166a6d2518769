"""Several engine cores as one: the choice of one, its outputs, and what the end of one means."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmstack_core_scheduler.request import prefix_salt
from llmstack_engine_client import AsyncMPClient, BalancedClient, engine_configs, make_async_client
from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.routing import RoutingPolicy
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.messages.control import ControlCall, ControlResult
from llmstack_engine_core.messages.protocol import AbortRequests, CacheUpdate, ClientMessage, FollowCache, SleepChanged
from llmstack_kv_cache import segment_keys
from llmstack_kv_cache.segments import pack_keys
from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    EngineStartError,
    FinishReason,
    InvalidRequestError,
    ModelRunnerConfig,
    SamplingParams,
    SchedulerStats,
)


class FakeClient(AsyncClient):
    """A client whose engine core is the test."""

    restarts = 0

    def __init__(self, num_blocks: int = 64, block_size: int = 16) -> None:
        super().__init__(start_timeout_s=5.0)
        self.sent: list[ClientMessage] = []
        self.is_shut_down = False
        self.is_busy = False
        self.deliver(EngineReady(num_blocks, block_size, 128, 257, "float32", "cpu"))

    def deliver(self, message: Any) -> None:
        self._mailbox.take(message)
        self._wake()

    def die(self) -> None:
        self._mailbox.set_dead("it was killed")
        self._wake()

    def finish(self, request_id: str, stats: SchedulerStats | None = None) -> None:
        output = EngineCoreOutput(request_id, [1], finish_reason=FinishReason.STOP)
        self.deliver(EngineCoreOutputs([output], 1.0, stats))

    @property
    def num_restarts(self) -> int:
        return self.restarts

    @property
    def request_ids(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, EngineCoreRequest)]

    async def shutdown(self) -> None:
        self.is_shut_down = True
        self.die()

    async def _send(self, message: ClientMessage) -> None:
        self.sent.append(message)
        if isinstance(message, ControlCall):
            level = message.arguments[0] if message.operation is Control.SLEEP else 0
            self.deliver(SleepChanged(0 if self.is_busy else level))
            self.deliver(ControlResult(message.call_id, message.operation, not self.is_busy))

    def _attach(self) -> None:
        """Everything arrives through `deliver`."""


def request(request_id: str, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, list(prompt), SamplingParams(max_tokens=4, seed=0), **fields)


@pytest.fixture
def engines() -> list[FakeClient]:
    return [FakeClient(num_blocks=64 - index) for index in range(3)]


@pytest.fixture
def client(engines: list[FakeClient]) -> BalancedClient:
    return BalancedClient(engines)


async def test_requests_go_to_the_least_busy_and_equally_busy_ones_in_order(
    client: BalancedClient, engines: list[FakeClient]
) -> None:
    for index in range(7):
        await client.add_request(request(f"r{index}"))
    assert [engine.request_ids for engine in engines] == [["r0", "r3", "r6"], ["r1", "r4"], ["r2", "r5"]]
    engines[1].finish("r1")
    await client.get_outputs()
    await client.add_request(request("next"))
    assert engines[1].request_ids[-1] == "next"


async def test_what_other_clients_have_there_counts_too(client: BalancedClient, engines: list[FakeClient]) -> None:
    await client.add_request(request("mine"))
    engines[0].finish("mine", SchedulerStats(num_running=2, num_waiting=1))
    await client.get_outputs()
    for index in range(6):
        await client.add_request(request(f"r{index}"))
    assert [len(engine.request_ids) for engine in engines] == [1, 3, 3]
    await client.add_request(request("r6"))
    assert engines[0].request_ids == ["mine", "r6"]


async def test_completions_of_one_prompt_stay_together(client: BalancedClient, engines: list[FakeClient]) -> None:
    await client.add_request(request("first"))
    for index in range(3):
        await client.add_request(request(f"fork{index}", fork_of="first"))
    assert engines[0].request_ids == ["first", "fork0", "fork1", "fork2"]


SYSTEM = list(range(1000, 1300))


async def cache(engine: FakeClient, prompt: list[int], salt: str = "", number: int = 0) -> None:
    """The engine core says that this is all that it has cached."""
    engine.deliver(CacheUpdate(number, True, pack_keys(segment_keys(prompt, 16, salt))))


async def test_all_engine_cores_are_followed_once_they_are_ready_unless_their_caches_do_not_matter() -> None:
    for routing, expected in ((RoutingPolicy.EXACT, [FollowCache()]), (RoutingPolicy.LOAD, [])):
        engines = [FakeClient(), FakeClient()]
        client = BalancedClient(engines, routing=routing)
        await client.wait_until_ready()
        for name in ("a", "b"):
            await client.add_request(request(name))
        for engine in engines:
            assert [message for message in engine.sent if isinstance(message, FollowCache)] == expected


async def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_is_much_busier(
    client: BalancedClient, engines: list[FakeClient]
) -> None:
    await client.wait_until_ready()
    for engine in engines:
        await cache(engine, SYSTEM if engine is engines[1] else [])
    for index in range(6):
        await client.add_request(request(f"next{index}", prompt=[*SYSTEM, index]))
    assert engines[1].request_ids == ["next0", "next1", "next2", "next3"]
    assert engines[0].request_ids == ["next4", "next5"]  # it will have the beginning from here on
    await client.add_request(request("tenant", prompt=SYSTEM, cache_salt="another's"))
    assert engines[2].request_ids == ["tenant"]


async def test_the_prefixes_of_an_adapter_are_its_own(client: BalancedClient, engines: list[FakeClient]) -> None:
    await client.wait_until_ready()
    await cache(engines[0], [])
    await cache(engines[1], SYSTEM)
    await cache(engines[2], SYSTEM, salt=prefix_salt("tenant", "adapter"))
    await client.add_request(request("r", prompt=SYSTEM, cache_salt="tenant", lora_name="adapter"))
    assert engines[2].request_ids == ["r"]


async def test_what_has_been_evicted_is_not_preferred(client: BalancedClient, engines: list[FakeClient]) -> None:
    await client.wait_until_ready()
    for engine in engines:
        await cache(engine, SYSTEM if engine is engines[1] else [])
    engines[1].deliver(CacheUpdate(1, False, removed=pack_keys(segment_keys(SYSTEM, 16)[:1])))
    await client.add_request(request("r", prompt=SYSTEM))
    assert engines[0].request_ids == ["r"]


async def test_an_engine_core_of_which_a_report_is_missing_counts_as_empty_and_is_followed_again(
    client: BalancedClient, engines: list[FakeClient]
) -> None:
    await client.wait_until_ready()
    await client.add_request(request("a"))
    await cache(engines[1], SYSTEM)
    engines[1].deliver(CacheUpdate(2, False))
    engines[1].sent.clear()
    await client.add_request(request("r", prompt=SYSTEM))
    assert engines[1].sent[0] == FollowCache()
    assert engines[1].request_ids == ["r"]  # since the first one is busier
    await cache(engines[2], SYSTEM, number=7)
    await client.add_request(request("s", prompt=SYSTEM))
    assert engines[2].request_ids == ["s"]


async def test_an_engine_core_that_starts_again_counts_as_empty_and_is_followed_again(
    client: BalancedClient, engines: list[FakeClient]
) -> None:
    await client.wait_until_ready()
    for engine in engines:
        await cache(engine, SYSTEM if engine is engines[2] else [])
    await client.add_request(request("a", prompt=SYSTEM))
    engines[2].restarts += 1
    await client.add_request(request("b", prompt=SYSTEM))
    assert (engines[2].request_ids, engines[0].request_ids) == (["a"], ["b"])
    assert engines[2].sent[-1] == FollowCache()


async def test_engine_cores_take_turns_under_round_robin(engines: list[FakeClient]) -> None:
    client = BalancedClient(engines, routing=RoutingPolicy.ROUND_ROBIN)
    await client.wait_until_ready()
    for index in range(4):
        await client.add_request(request(f"r{index}"))
        await client.abort_requests([f"r{index}"])
    assert [engine.request_ids for engine in engines] == [["r0", "r3"], ["r1"], ["r2"]]


async def test_blocks_of_different_sizes_are_not_compared() -> None:
    engines = [FakeClient(), FakeClient(block_size=32)]
    client = BalancedClient(engines)
    await client.wait_until_ready()
    await client.add_request(request("r", prompt=SYSTEM))
    assert FollowCache() not in engines[0].sent + engines[1].sent


async def test_outputs_say_whose_they_are_and_engine_cores_take_turns(
    client: BalancedClient, engines: list[FakeClient]
) -> None:
    for index in range(6):
        await client.add_request(request(f"r{index}"))
    for index in (0, 3, 1):  # two steps of the first, one of the second
        engines[index % 3].finish(f"r{index}")
    seen = [await client.get_outputs() for _ in range(3)]
    assert [(outputs.engine_index, outputs.outputs[0].request_id) for outputs in seen] == [
        (0, "r0"),
        (1, "r1"),
        (0, "r3"),
    ]
    waiting = asyncio.ensure_future(client.get_outputs())
    await asyncio.sleep(0)
    assert not waiting.done()
    engines[2].finish("r2")
    assert (await waiting).engine_index == 2


async def test_an_abort_goes_where_its_request_is(client: BalancedClient, engines: list[FakeClient]) -> None:
    for index in range(3):
        await client.add_request(request(f"r{index}"))
    await client.abort_requests(["r1", "unknown"])
    assert [engine.sent[-1] for engine in engines][1] == AbortRequests(("r1",))
    assert not any(isinstance(message, AbortRequests) for message in engines[0].sent + engines[2].sent)


async def test_an_id_in_use_anywhere_is_refused(client: BalancedClient) -> None:
    await client.add_request(request("r"))
    with pytest.raises(InvalidRequestError, match="in use"):
        await client.add_request(request("r"))


async def test_the_end_of_one_is_the_end_of_all_and_says_which(
    client: BalancedClient, engines: list[FakeClient]
) -> None:
    waiting = asyncio.ensure_future(client.get_outputs())
    await asyncio.sleep(0)
    engines[1].die()
    with pytest.raises(EngineDeadError, match="engine 1: it was killed"):
        await waiting
    assert client.is_dead
    with pytest.raises(EngineDeadError, match="engine 1"):
        await client.add_request(request("r"))


async def test_ready_means_all_and_tells_the_least_of_them(client: BalancedClient) -> None:
    ready = await client.wait_until_ready()
    assert (ready.num_blocks, ready.engine_index) == (62, 2)
    assert [engine.engine_index for engine in client.engines] == [0, 1, 2]


async def test_they_sleep_together_or_not_at_all(client: BalancedClient, engines: list[FakeClient]) -> None:
    assert await client.call(Control.SLEEP, 2)
    assert [engine.sleep_level for engine in engines] == [2, 2, 2]
    await client.call(Control.WAKE_UP)
    engines[2].is_busy = True
    assert not await client.call(Control.SLEEP, 1)
    assert client.sleep_level == 0
    assert not await client.call(Control.RESET_PREFIX_CACHE)


async def read_endlessly(client: BalancedClient) -> None:
    while True:
        await client.get_outputs()


def config(options: str = "", **changes: Any) -> EngineConfig:
    model = ModelRunnerConfig(f"echo?{options}", num_engines=2)
    return EngineConfig(model, runner="echo", log_level="CRITICAL", shutdown_grace_s=3.0, **changes)


def test_engine_cores_record_their_steps_in_files_of_their_own() -> None:
    assert [one.record_steps for one in engine_configs(config(record_steps="/tmp/steps"))] == [
        "/tmp/steps.0",
        "/tmp/steps.1",
    ]


def test_engine_cores_have_gpus_of_their_own_one_for_each_rank() -> None:
    one_each = config()
    assert [one.model.first_gpu for one in engine_configs(one_each)] == [0, 1]
    with_ranks = replace(one_each, model=replace(one_each.model, tensor_parallel_size=4))
    assert [one.model.first_gpu for one in engine_configs(with_ranks)] == [0, 4]


def test_several_engine_cores_need_processes_of_their_own() -> None:
    with pytest.raises(ValueError, match="one engine core"):
        make_async_client(config(), multiprocess=False)


async def test_two_real_engine_cores_share_the_requests_and_leave_nothing() -> None:
    client = make_async_client(config("step_delay_s=0.3"))  # none ends before the last one is sent
    assert isinstance(client, BalancedClient)
    await client.wait_until_ready()
    assert len({ready.pid for ready in client.engines}) == 2
    for index in range(8):
        await client.add_request(request(f"r{index}"))
    engine_of: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    num_finished = 0
    while num_finished < 8:
        outputs = await client.get_outputs()
        for output in outputs.outputs:
            engine_of[output.request_id] = outputs.engine_index
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            num_finished += output.finish_reason is not None
    assert tokens == {f"r{index}": [5, 6, 7, 5] for index in range(8)}
    assert sorted(engine_of.values()) == [0, 0, 0, 0, 1, 1, 1, 1]
    processes = [one._process for one in client._clients if isinstance(one, AsyncMPClient)]
    await client.shutdown()
    assert not any(process.is_alive or process.directory.exists() for process in processes)


async def test_one_that_cannot_start_ends_the_others_and_is_named() -> None:
    client = make_async_client(config("load_error=the+model+is+odd"))
    with pytest.raises(EngineStartError, match=r"engine [01]: the model is odd"):
        await client.wait_until_ready()
    assert client.is_dead


async def test_one_that_is_killed_is_named() -> None:
    client = make_async_client(config("step_delay_s=60"))
    await client.wait_until_ready()
    await client.add_request(request("r"))
    os.kill(client.engines[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"engine 1: .*SIGKILL"):
        await read_endlessly(client)
    await client.shutdown()


async def test_steps_are_those_of_the_engine_core_that_was_asked_for() -> None:
    clients = [FakeClient(), FakeClient()]
    await BalancedClient(clients).call(Control.RECENT_STEPS, 1, engine_index=1)
    assert clients[0].sent == []
    assert [(call.operation, call.arguments) for call in clients[1].sent] == [(Control.RECENT_STEPS, (1,))]
