"""The ranks of several nodes, as the engine core's rank sees them."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Final

import zmq

from llmstack_engine_client.hosts.members import Members, describe
from llmstack_engine_client.hosts.messages import Answer, Failed, Join, Leave, Message, Start, own_name
from llmstack_engine_client.hosts.network import Network, free_address
from llmstack_engine_core.ipc.addresses import interface_address
from llmstack_parallel.channel import ZmqChannel
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.hosts.facts import facts_of
from llmstack_parallel.hosts.local_ranks import LocalRanks
from llmstack_parallel.hosts.meeting import Meeting, first_machine, make_store, placement_of
from llmstack_parallel.messages import MAX_FRAME_BYTES, MESSAGES, MeetMessage
from llmstack_parallel.protocols import Channel, Exchange
from llmstack_parallel.rank_loop import START_TIMEOUT_S
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError, ModelRunnerConfig

logger = logging.getLogger(__name__)

_POLL_MS: Final = 100
_MAX_EPOCH: Final = 2**62
HINT_S: Final = 10.0
NUM_LOOKS: Final = 4  # within the time without a sign of life


class HostPeers:
    """The other ranks, on this node and on those that join it.

    Attributes:
        epoch: Number of this start, in every frame.
        exchange: That of rank 0, in this process.
        channels: By rank.
    """

    def __init__(self, config: ModelRunnerConfig, place: Callable[[str], Callable[[], None]] | None = None) -> None:
        """Waits for all nodes, and returns when their ranks can be called.

        `place`: Starts the other nodes, which join at an address; what it returns ends them. None waits for those that
        others start.

        Raises:
            EngineStartError: A node does not fit or does not come, or a rank could not be started.
        """
        self._config, self._placement = config, placement_of(config)
        if self._placement.node:
            raise EngineStartError(f"node {self._placement.node} has no engine core: `llmstack serve` hosts its ranks")
        if self._placement.interface:
            interface_address(self._placement.interface)  # it is there; before the other nodes are waited for
        self._topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size)
        self.epoch = 1 + secrets.randbelow(_MAX_EPOCH - 1)
        self.channels: dict[int, Channel] = {}
        self._lost: str | None = None
        self._is_stopped = False
        self._ranks: LocalRanks | None = None
        self._end_nodes: Callable[[], None] = lambda: None
        self._watcher: threading.Thread | None = None
        self._exchange: Exchange | None = None
        first = replace(first_machine(config), name=f"node 0 on {own_name()}")
        self._members = Members(first, "node", range(1, self._placement.num_nodes), facts_of(config))
        self._network = Network(self._placement.key_file, MAX_FRAME_BYTES)
        self._wake, self._woken = socket.socketpair()
        try:
            if place is not None:
                self._end_nodes = place(self._members.address)
            self._wait_for_nodes()
            self.exchange: Exchange = self._start()
        except BaseException as error:
            self.stop(is_over=not isinstance(error, LostRankError))
            raise

    def _wait_for_nodes(self) -> None:
        began_s, has_hinted, address = monotonic(), False, self._members.address
        while missing := self._find_missing():
            waited_s, numbers = monotonic() - began_s, ", ".join(map(str, missing))
            if waited_s > START_TIMEOUT_S:
                raise EngineStartError(f"node {numbers} has not joined {address} within {START_TIMEOUT_S:g} s")
            if waited_s > HINT_S and not has_hinted:
                has_hinted = True
                logger.warning("waiting at %s for node %s: is it there, with the same key file?", address, numbers)
            self._poll()
            for _, join, message in self._members.read():
                if isinstance(message, Answer) and message.is_final:  # all nodes get the sentence
                    self._tell_all(message)
                    raise EngineStartError(message.refusal)
                if isinstance(message, Join):
                    logger.info("%s has joined", describe("node", join))

    def _find_missing(self) -> list[int]:
        """Nodes that have not joined, or have gone since."""
        joined = self._members.joined
        for sender in [sender for sender in joined if not self._members.is_there(sender)]:
            del joined[sender]
        there = {join.number for join in joined.values()}
        return [number for number in range(1, self._placement.num_nodes) if number not in there]

    def _poll(self, *fds: int) -> list[int]:
        """The readable descriptors, once there are some, a message, or it is time to look."""
        poller = zmq.Poller()
        for watched in (*self._members.sockets, *fds):
            poller.register(watched, zmq.POLLIN)
        ready = dict(poller.poll(int(self._placement.silence_s * 1000 / NUM_LOOKS) + 1))
        return [fd for fd in fds if fd in ready]

    def _tell_all(self, message: Message) -> None:
        for sender in self._members.joined:
            self._members.send(sender, message)

    def _start(self) -> Exchange:
        """Starts all ranks, and tells each the addresses of the others."""
        config, per_node, near = self._config, self._config.num_local_ranks, self._members.address
        self._members.is_closed_to = "the ranks of other nodes are running"
        rank_to_address: dict[int, str] = {}
        for rank in self._topology.peers:
            bound, rank_to_address[rank] = self._network.listen(zmq.PAIR, free_address(near))
            self.channels[rank] = ZmqChannel(bound)
        orders = tuple(rank_to_address.items())
        for sender, join in self._members.joined.items():
            first = join.number * per_node
            ranks = tuple((rank, rank_to_address[rank]) for rank in range(first, first + per_node))
            self._members.send(sender, Start(str(self.epoch), ranks=ranks))
        self._ranks = ranks_here = LocalRanks(config, self.epoch, orders[: per_node - 1])
        segments = ranks_here.segments(0)
        self._watcher = threading.Thread(target=self._watch, args=(ranks_here,), name="nodes", daemon=True)
        self._watcher.start()
        meeting = Meeting(self._network, config, 0, self.epoch, free_address(near))
        links = {0: meeting.link} | {rank: self._receive_link(rank).link for rank in self.channels}
        store, store_address = make_store(config)
        for rank, channel in self.channels.items():
            message = MeetMessage(self._next_link(rank, links), store_address)
            channel.send(MESSAGES.encode(message, self.epoch))
        self._exchange = exchange = meeting.join(MeetMessage(self._next_link(0, links), store_address), segments, store)
        ranks_here.close_segments()
        if self._lost is not None:
            exchange.abort()
        return exchange

    def _receive_link(self, rank: int) -> MeetMessage:
        """The first message of a rank."""
        deadline = monotonic() + START_TIMEOUT_S
        while (frame := self.channels[rank].receive(_POLL_MS)) is None:
            if self._lost is not None:
                raise LostRankError(self._lost)
            if monotonic() > deadline:
                raise LostRankError(f"{self._topology.describe(rank)} does not start")
        _, message = MESSAGES.decode(frame, self.epoch)
        if not isinstance(message, MeetMessage):
            raise LostRankError(f"{self._topology.describe(rank)} sent a {type(message).__name__}")
        return message

    def _next_link(self, rank: int, links: dict[int, str]) -> str:
        """The address of the rank at the same place of the next stage."""
        topology = self._topology
        stage = topology.stage(rank) + 1
        return links[topology.rank(stage, topology.place(rank))] if stage < topology.pipeline_parallel_size else ""

    def lost(self) -> str | None:
        """Which rank or node has ended, and how; None while all run."""
        return self._lost

    def pids(self) -> dict[int, int]:
        """Processes of the ranks of this node."""
        return {} if self._ranks is None else self._ranks.pids()

    def stop(self, *, is_over: bool = True) -> None:
        """Ends all ranks. Idempotent.

        `is_over`: For good; otherwise the other nodes ask to join again.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        self._wake.close()
        if self._watcher is not None:
            self._watcher.join()
        self._woken.close()
        self._members.close(is_over=is_over)
        if self._ranks is not None:
            self._ranks.stop()
        self._end_nodes()
        self._network.close()

    def _watch(self, ranks: LocalRanks) -> None:
        """Notices a node or a rank that ends. The only user of the members meanwhile."""
        fds = ranks.fds
        while True:
            ready = self._poll(*fds, self._woken.fileno())
            if self._woken.fileno() in ready:
                return
            for fd in ready:
                fds.remove(fd)
                self._lose(ranks.describe_loss(fd))
            for _, join, message in self._members.read():
                self._note(join, message)
            for sender, join in list(self._members.joined.items()):
                if not self._members.is_there(sender):
                    silence = f"has given no sign of life for {self._placement.silence_s:g} s"
                    self._lose(f"{describe('node', join)} has ended, or {silence}")

    def _note(self, join: Join, message: Message) -> None:
        """Takes a later message of a node that has joined."""
        if isinstance(message, Leave):
            self._lose(f"{describe('node', join)}: it was stopped")
        elif isinstance(message, Failed) and message.generation == str(self.epoch):
            self._lose(f"{describe('node', join)}: {message.reason}")

    def _lose(self, how: str) -> None:
        if self._lost is None:
            self._lost = how
            logger.error("%s", how)
            if self._exchange is not None:
                self._exchange.abort()
