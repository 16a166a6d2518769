"""Machines that join the first one, and those that may not."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from engine_core_helpers.ports import free_address
from engine_core_helpers.processes import wait_until

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.hosts.joining import Joining, JoinRefusedError
from llmstack_engine_client.hosts.messages import Failed, Join, Start, own_version
from llmstack_engine_client.hosts.rendezvous import Generation, Rendezvous, facts_of, first_machine
from llmstack_engine_client.processes.launcher import launch_engine_process
from llmstack_engine_client.replicas.hosts import HostsClient
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.config import HostsConfig
from llmstack_engine_core.ipc.keys import make_key_file, read_keys, replace_keys
from llmstack_types import EngineStartError, ModelRunnerConfig


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    make_key_file(path)
    return path


@pytest.fixture
def hosts() -> HostsConfig:
    return HostsConfig(free_address(), size=4, num_local=2, start_rank=2)


FACTS = (("version", own_version()), ("--data-parallel-size", "4"))
JOIN = Join("other", 2, FACTS, ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"))


def config_of(hosts: HostsConfig, key_file: Path | None) -> EngineConfig:
    key = None if key_file is None else str(key_file)
    return EngineConfig(ModelRunnerConfig("echo"), runner="echo", log_level="CRITICAL", key_file=key, hosts=hosts)


def joining_of(hosts: HostsConfig, key_file: Path, on_start: Callable[[Start], None] = lambda start: None) -> Joining:
    return Joining(first_machine(hosts, str(key_file)), patience_s=60, on_start=on_start)


class First:
    """The first machine, with what it has received."""

    def __init__(self, members: Generation) -> None:
        self.joins: list[Join] = []
        self.leaves: list[Join] = []
        self._there: Mapping[int, Join] = {}
        members.serve(self._on_change)

    def _on_change(self, joins: Mapping[int, Join]) -> None:
        self.joins += [join for number, join in joins.items() if number not in self._there]
        self.leaves += [join for number, join in self._there.items() if number not in joins]
        self._there = joins


@asynccontextmanager
async def first_machine_of(hosts: HostsConfig, key_file: Path) -> AsyncIterator[First]:
    members = Rendezvous(config_of(hosts, key_file)).open("start")
    try:
        yield First(members)
    finally:
        await members.close()


async def refusal(hosts: HostsConfig, key_file: Path, join: Join) -> str:
    with pytest.raises(JoinRefusedError) as caught:
        async with asyncio.timeout(60):
            await joining_of(hosts, key_file).run(join)
    return str(caught.value)


async def test_a_machine_joins_leaves_and_ends_with_the_first_one(hosts: HostsConfig, key_file: Path) -> None:
    joining = asyncio.ensure_future(joining_of(hosts, key_file).run(JOIN))  # it may be there before the first
    await asyncio.sleep(0.05)
    async with first_machine_of(hosts, key_file) as first:
        await wait_until(lambda: first.joins == [JOIN])
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        await wait_until(lambda: first.leaves == [JOIN])
        joining = asyncio.ensure_future(joining_of(hosts, key_file).run(JOIN))
        await wait_until(lambda: len(first.joins) == 2)
    async with asyncio.timeout(60):
        await joining  # it was notified


async def test_what_does_not_fit_is_refused_in_a_sentence_that_names_both_sides(
    hosts: HostsConfig, key_file: Path
) -> None:
    differ = "the first machine and engine core 2 on other differ: "
    others = "other machines than the first have engine cores 2 to 3, but other has "
    async with first_machine_of(hosts, key_file) as first:
        for changes, words in (
            ({"facts": (("version", "9.9"), *FACTS[1:])}, f"{differ}version is {own_version()}, but 9.9"),
            ({"facts": facts_of(replace(hosts, size=8))}, f"{differ}--data-parallel-size is 4, but 8"),
            ({"facts": FACTS[:1]}, f"{differ}--data-parallel-size is 4, but unknown"),
            ({"number": 3}, f"{others}3 to 4"),
            ({"number": 1}, f"{others}1 to 2"),
            ({"addresses": ("tcp://0.0.0.0:1",)}, "listens on one address of the machine, not on all"),
        ):
            assert words in await refusal(hosts, key_file, replace(JOIN, **changes))
        assert first.joins == []


async def test_of_two_machines_with_the_same_engine_core_the_second_is_refused(
    hosts: HostsConfig, key_file: Path
) -> None:
    # The third machine alone is impatient: one that stands still for a moment must not lose its place to it.
    quick = replace(hosts, heartbeat_timeout_s=0.3)
    hosts = replace(hosts, heartbeat_timeout_s=60.0)
    async with first_machine_of(hosts, key_file) as first:
        joining = asyncio.ensure_future(joining_of(hosts, key_file).run(JOIN))
        await wait_until(lambda: first.joins)
        third = replace(JOIN, host="third", number=3, addresses=JOIN.addresses[:1])
        assert await refusal(quick, key_file, third) == "engine core 3 is on other already, and on third"
        assert not joining.done()
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


async def test_other_keys_are_refused_and_a_second_pair_is_accepted_while_keys_are_replaced(
    hosts: HostsConfig, key_file: Path, tmp_path: Path
) -> None:
    other, both = tmp_path / "other", tmp_path / "both"
    make_key_file(other)
    shutil.copy(key_file, both)
    (used,) = read_keys(key_file).pairs
    replace_keys(both, (zmq.curve_keypair(), used))
    async with first_machine_of(hosts, key_file) as first:
        assert "different keys" in await refusal(hosts, other, JOIN)
        assert first.joins == []
        replace_keys(key_file, (used, read_keys(both).pairs[0]))
    async with first_machine_of(hosts, both) as first:  # it uses the new pair, the other machine still the old one
        joining = asyncio.ensure_future(joining_of(hosts, key_file).run(JOIN))
        await wait_until(lambda: first.joins)
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


def test_the_first_machine_listens_on_one_address_and_with_keys(hosts: HostsConfig, key_file: Path) -> None:
    with pytest.raises(EngineStartError, match="not on all"):
        Rendezvous(config_of(replace(hosts, address="tcp://0.0.0.0:29550"), key_file))
    with pytest.raises(EngineStartError, match="needs"):
        Rendezvous(config_of(hosts, None))


class NoClient(AsyncClient):
    """An engine core of the first machine that computes other bits than any."""

    async def shutdown(self) -> None:
        self._mailbox.set_dead("it is shut down")

    async def _send(self, message: object) -> None:
        raise NotImplementedError

    def _attach(self) -> None:
        """Nothing comes."""


async def test_an_engine_core_of_other_bits_is_refused_with_its_machine_unless_they_may_be_mixed(
    hosts: HostsConfig, key_file: Path
) -> None:
    hosts = replace(hosts, size=2, num_local=1, start_rank=1)
    config = config_of(hosts, key_file)
    process = launch_engine_process(config, free_address())
    try:
        for is_mixed in (False, True):
            local = NoClient(60.0)
            members = Rendezvous(config).open("start")
            client = HostsClient(config, replace(hosts, allow_mixed_numerics=is_mixed), [local], members)
            joining = joining_of(hosts, key_file)
            join = Join("other", 1, facts_of(hosts), (process.address,), joining.server_key)
            running = asyncio.ensure_future(joining.run(join))
            waiting = asyncio.ensure_future(client.wait_until_ready())
            await wait_until(lambda: client.engines)  # noqa: B023
            theirs = client.engines[0]
            local._mailbox.take(replace(theirs, numeric_contract_id="ours", backends={"echo": "fast"}))
            local._wake()
            await waiting
            if is_mixed:
                assert len(client.engines) == 2
            else:  # also where it was there first
                words = "engine core 0 and engine core 1 on other differ: echo is fast, but python"
                with pytest.raises(JoinRefusedError, match=words):
                    await asyncio.wait_for(running, 60)
                assert len(client.engines) == 1
            running.cancel()
            await client.shutdown()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        process.stop()


async def test_a_generation_is_started_awaited_and_ended_on_the_other_machines(
    hosts: HostsConfig, key_file: Path
) -> None:
    rendezvous = Rendezvous(config_of(hosts, key_file))
    starts: list[Start] = []

    def join(generation: str) -> tuple[Joining, asyncio.Future[None]]:
        joining = joining_of(hosts, key_file, starts.append)
        return joining, asyncio.ensure_future(joining.run(replace(JOIN, generation=generation)))

    start = rendezvous.open("start")
    joins = First(start).joins
    _, of_start = join("")
    await wait_until(lambda: joins)
    assert (list(start.awaited), start.find_problem()) == ([], "")
    second = rendezvous.open("next")
    assert second.awaited == [2, 3]
    await wait_until(lambda: starts)
    assert starts == [second.start]
    assert second.start.name == "next"

    # Both are there, until the first machine ends one.
    later = First(second).joins
    joining, of_second = join(second.start.generation)
    await wait_until(lambda: later)
    joining.tell(Failed(second.start.generation, "it has ended"))
    await wait_until(lambda: second.find_problem() == "other: it has ended")
    await start.close()
    async with asyncio.timeout(60):
        await of_start
    assert not of_second.done()

    # A machine with unknown engine cores starts those of now, and ends its own.
    del starts[:]
    _, of_third = join("another first machine's:7")
    async with asyncio.timeout(60):
        await of_third
    assert starts == [second.start]
    third = rendezvous.open("larger")
    of_second.cancel()
    await asyncio.gather(of_second, return_exceptions=True)
    await wait_until(third.find_problem)
    assert third.problem == "other is away"
    await third.close()
    await second.close()
