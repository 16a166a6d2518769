"""Several engine cores as one: the choice of one, its outputs, and what the end of one means."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from llmstack_engine_core import EngineConfig
from llmstack_engine_core.client import AsyncMPClient, BalancedClient, engine_configs, make_async_client
from llmstack_engine_core.client.async_client import AsyncClient
from llmstack_engine_core.ipc.frames import (
    AbortRequests,
    ClientMessage,
    ControlCall,
    ControlResult,
    SleepChanged,
)
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

    def __init__(self, num_blocks: int = 64) -> None:
        super().__init__(start_timeout_s=5.0)
        self.sent: list[ClientMessage] = []
        self.is_shut_down = False
        self.is_busy = False
        self.deliver(EngineReady(num_blocks, 16, 128, 257, "float32", "cpu"))

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


async def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_is_much_busier(
    client: BalancedClient, engines: list[FakeClient]
) -> None:
    system = list(range(100, 400))
    await client.add_request(request("a"))  # engine 0
    await client.add_request(request("first", prompt=system))  # engine 1
    for index in range(5):
        await client.add_request(request(f"next{index}", prompt=[*system, index]))
    assert engines[1].request_ids == ["first", *(f"next{index}" for index in range(4))]
    assert engines[2].request_ids == ["next4"]  # it has the beginning from here on
    await client.add_request(request("later", prompt=[*system, 9]))
    await client.add_request(request("tenant", prompt=system, cache_salt="another's"))
    assert engines[2].request_ids == ["next4", "later"]
    assert engines[0].request_ids == ["a", "tenant"]


async def test_of_two_known_beginnings_the_longer_one_counts(client: BalancedClient, engines: list[FakeClient]) -> None:
    shared = list(range(100))
    one, other = [*shared, *[1] * 200], [*shared, *[2] * 200]
    await client.add_request(request("one", prompt=one))
    await report(client, engines[0], SchedulerStats(num_running=9))
    await client.add_request(request("other", prompt=other))
    await report(client, engines[0], SchedulerStats(num_running=1))
    await client.add_request(request("one again", prompt=one))
    await client.add_request(request("other again", prompt=other))
    assert engines[0].request_ids == ["one", "one again"]
    assert engines[1].request_ids == ["other", "other again"]


async def report(client: BalancedClient, engine: FakeClient, stats: SchedulerStats) -> None:
    engine.deliver(EngineCoreOutputs([], 1.0, stats))
    await client.get_outputs()


async def test_emptied_caches_are_not_preferred(client: BalancedClient, engines: list[FakeClient]) -> None:
    await client.add_request(request("a"))
    await client.add_request(request("first", prompt=list(range(100))))
    await client.call(Control.RESET_PREFIX_CACHE)
    await client.add_request(request("second", prompt=list(range(100))))
    assert engines[2].request_ids == ["second"]


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
