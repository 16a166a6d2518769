"""The first machine's list of the others, without engine cores and ranks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from engine_core_helpers.ports import free_address
from engine_core_helpers.processes import wait_until

from llmstack_engine_client.hosts.joining import Joining, JoinRefusedError
from llmstack_engine_client.hosts.members import Members
from llmstack_engine_client.hosts.messages import MAX_MESSAGE_BYTES, MESSAGES, Answer, Join, Leave, Message, Start
from llmstack_engine_client.hosts.network import FirstMachine, Network
from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_types import EngineStartError

FACTS = (("version", "1"), ("dtype", "float32"))


@pytest.fixture
def first(tmp_path: Path) -> FirstMachine:
    key_file = tmp_path / "keys"
    make_key_file(key_file)
    return FirstMachine(free_address(), str(key_file), 5.0, "node 0 on a")


@pytest.fixture
def members(first: FirstMachine) -> Iterator[Members]:
    made = Members(first, "node", range(1, 4), FACTS)
    yield made
    made.close()


def join(number: int = 1, host: str = "b") -> Join:
    return Join(host, number, FACTS)


async def read(members: Members, num_messages: int = 1) -> list[tuple[bytes, Join, Message]]:
    """The next messages, at least so many."""
    found: list[tuple[bytes, Join, Message]] = []
    async with asyncio.timeout(60):
        while len(found) < num_messages:
            found += members.read()
            await asyncio.sleep(0.01)
    return found


async def end(joining: asyncio.Task[None]) -> None:
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


async def test_a_node_joins_receives_what_to_start_and_leaves(first: FirstMachine, members: Members) -> None:
    starts: list[Start] = []
    joining = asyncio.create_task(Joining(first, 60, on_start=starts.append).run(join()))
    ((sender, who, message),) = await read(members)
    assert who == message == join()
    assert list(members.joined) == [sender]
    order = Start("7", ranks=((1, "tcp://127.0.0.1:1"),))
    assert members.send(sender, order)
    await wait_until(lambda: starts)
    assert starts == [order]
    await end(joining)
    assert await read(members) == [(sender, join(), Leave())]
    assert members.joined == {}


async def test_a_machine_that_cannot_start_what_it_is_asked_for_leaves(first: FirstMachine, members: Members) -> None:
    def fail(start: Start) -> None:
        raise EngineStartError(f"no room for {start.name}")

    joining = asyncio.create_task(Joining(first, 60, on_start=fail).run(join()))
    ((sender, *_),) = await read(members)
    members.send(sender, Start("7", "next"))
    assert await read(members) == [(sender, join(), Leave())]
    with pytest.raises(EngineStartError, match="no room for next"):
        await joining


async def test_numbers_that_no_other_machine_may_have_are_refused(first: FirstMachine, members: Members) -> None:
    for number in (0, 4):
        joining = asyncio.create_task(Joining(first, 60).run(join(number)))
        sentence = f"other machines than the first have nodes 1 to 3, but b has {number} to {number}"
        assert [message for *_, message in await read(members)] == [Answer(sentence)]
        with pytest.raises(JoinRefusedError, match=sentence):
            await joining


async def test_a_machine_asks_again_while_the_list_is_closed_and_while_another_has_its_number(
    first: FirstMachine, members: Members
) -> None:
    members.is_closed_to = "others are running"
    one = asyncio.create_task(Joining(first, 60).run(join()))
    refusals = await read(members, 2)
    assert {message for *_, message in refusals} == {Answer("others are running", is_final=False)}
    members.is_closed_to = ""
    while not members.joined:
        await read(members)
    other = asyncio.create_task(Joining(first, 60).run(join(host="c")))
    sentence = "node 1 is on b already, and on c"
    assert [message for *_, message in await read(members)] == [Answer(sentence, is_final=False)]
    await end(one)
    while [joined.host for joined in members.joined.values()] != ["c"]:
        await read(members)
    await end(other)


async def test_what_is_no_message_is_answered_by_a_refusal_and_costs_nothing_else(
    first: FirstMachine, members: Members
) -> None:
    network = Network(first.key_file, MAX_MESSAGE_BYTES)
    stranger = network.connect(zmq.DEALER, first.address)
    for frames in ([b""], [b"\xc1"], [b"\x93", b"\x01"], [MESSAGES.encode(join()), b"x"]):
        stranger.send_multipart(frames)
        async with asyncio.timeout(60):
            while not stranger.poll(0):
                assert list(members.read()) == []
                await asyncio.sleep(0.01)
        _, answer = MESSAGES.decode(stranger.recv())
        assert isinstance(answer, Answer)
        assert answer.refusal.startswith("node 0 on a runs llmstack ")
        assert answer.is_final
    stranger.send(MESSAGES.encode(Leave()))  # of a machine that has not joined
    joining = asyncio.create_task(Joining(first, 60).run(join()))
    assert [message for *_, message in await read(members)] == [join()]
    await end(joining)
    network.close()


async def test_a_join_is_only_of_the_connection_that_it_is_answered_on(first: FirstMachine) -> None:
    """An earlier one that arrived would name a machine that is there no more by then."""
    host, _, port = first.address.removeprefix("tcp://").rpartition(":")
    with socket.create_server((host, int(port))) as others:
        joining = asyncio.create_task(Joining(first, 60).run(join()))
        connection, _ = await asyncio.to_thread(others.accept)
    connection.close()
    members = Members(first, "node", range(1, 4), FACTS)
    ((sender, *_),) = await read(members)
    for _ in range(100):
        assert members.is_there(sender)
        assert list(members.read()) == []
        await asyncio.sleep(0.01)
    await end(joining)
    members.close()
