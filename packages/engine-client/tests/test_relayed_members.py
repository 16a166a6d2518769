"""Processes of the first machine that learn of other machines from the one that listens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmstack_engine_client.factory import attach_hosts_client
from llmstack_engine_client.hosts.membership import Membership
from llmstack_engine_client.hosts.messages import MESSAGES, Answer, Join
from llmstack_engine_client.hosts.relay import MembershipFeed, Message, RelayedMembers
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.config import HostsConfig
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_types import EngineStartError, ModelRunnerConfig

JOIN = Join("other", 2, (("a", "1"),), ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), b"k" * 40)


class Listening(Membership):
    """In place of the machine that listens."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[tuple[int, str]] = []

    def refuse(self, rank: int, reason: str) -> None:
        self.refused.append((rank, reason))
        self.drop(JOIN)

    async def close(self) -> None:
        """There is no listener."""


class Follower(RelayedMembers):
    """Another process, and what it has learnt."""

    def __init__(self, feed: MembershipFeed) -> None:
        super().__init__(lambda message: feed.refuse(json.loads(json.dumps(message))))
        self.there: list[Join] = []

    def begin(self) -> None:
        self.serve(lambda joins: setattr(self, "there", [*joins.values()]))


@pytest.fixture
def listening() -> Listening:
    return Listening()


@pytest.fixture
def followers() -> list[Follower]:
    return []


@pytest.fixture
def feed(listening: Listening, followers: list[Follower]) -> MembershipFeed:
    def publish(message: Message) -> None:
        for follower in followers:
            follower.take(json.loads(json.dumps(message)))

    feed = MembershipFeed(listening)
    feed.serve(publish)
    followers += [Follower(feed), Follower(feed)]
    return feed


def test_each_process_learns_of_machines_whenever_it_begins_to_serve(
    feed: MembershipFeed, listening: Listening, followers: list[Follower]
) -> None:
    early, late = followers
    early.begin()
    listening.add(JOIN)
    late.begin()
    assert early.there == late.there == [JOIN]
    assert early.host_of(3) == "other"
    started_again = Follower(feed)
    started_again.take(feed.state)
    started_again.begin()
    assert started_again.there == [JOIN]
    listening.drop(JOIN)
    assert early.there == late.there == []
    assert feed.state == {"members": []}
    assert early.host_of(3) == "the machine of engine core 3"


def test_a_machine_that_one_process_refuses_leaves_all_of_them_and_one_that_rejoined_stays(
    feed: MembershipFeed, listening: Listening, followers: list[Follower]
) -> None:
    one, other = followers
    one.begin()
    other.begin()
    listening.add(JOIN)
    one.refuse(2, "other bits")
    other.refuse(3, "other bits")  # it knows already
    assert listening.refused == [(2, "other bits")]
    assert one.there == other.there == []
    listening.add(JOIN)
    stale: list[Message] = []
    slow = RelayedMembers(stale.append)
    slow.take(feed.state)
    slow.refuse(2, "other bits")
    again = replace(JOIN, host="other again")
    listening.add(again)  # without a word from the connection before
    feed.refuse(stale[0])
    assert listening.refused == [(2, "other bits")]
    ((number, frame),) = feed.state["members"]
    assert (number, MESSAGES.decode(bytes.fromhex(frame))[1]) == (2, again)
    assert one.there == other.there == [again]


def test_what_is_no_message_about_a_machine_is_refused() -> None:
    members = RelayedMembers(lambda message: None)
    frame, other = MESSAGES.encode(JOIN).hex(), MESSAGES.encode(Answer()).hex()
    for entries in (None, [1], [[1]], [["1", frame]], [[1, other]], [[1, ""]], [[1, "no hex"]], [[1, frame], [2]]):
        message = {} if entries is None else {"members": entries}
        with pytest.raises(CodecError):
            members.take(message)
    assert members.host_of(2) == "the machine of engine core 2"


async def test_an_endpoint_is_dead_once_the_engine_cores_of_its_machine_have_ended_for_good_and_no_other_is_there(
    tmp_path_factory: pytest.TempPathFactory, feed: MembershipFeed, followers: list[Follower]
) -> None:
    folder = tmp_path_factory.mktemp("engine")
    folder.chmod(0o700)
    hosts = HostsConfig("tcp://127.0.0.1:1", size=2, num_local=1)
    config = EngineConfig(ModelRunnerConfig("echo"), runner="echo", hosts=hosts, max_restarts=3)
    members = followers[0]
    client = attach_hosts_client(config, [f"ipc://{folder}/engine.sock"], members, client_index=1)
    (local, remote) = client._clients
    assert not local.is_dead
    client.note_end(0, "it has ended")
    assert (local.is_dead, remote.is_dead) == (True, True)
    await client.shutdown()
    with pytest.raises(ValueError, match="no other machines"):
        attach_hosts_client(replace(config, hosts=None), [], members)
    with pytest.raises(EngineStartError):
        attach_hosts_client(config, ["tcp://10.0.0.1:1"], members)
