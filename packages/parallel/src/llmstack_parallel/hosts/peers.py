"""The ranks of several nodes, as the engine core's rank sees them."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

import zmq

from llmstack_engine_core.ipc.addresses import interface_address
from llmstack_parallel.channel import ZmqChannel
from llmstack_parallel.errors import LostRankError
from llmstack_parallel.hosts.facts import facts_of, own_name
from llmstack_parallel.hosts.local_ranks import LocalRanks
from llmstack_parallel.hosts.meeting import Meeting, make_store, placement_of
from llmstack_parallel.hosts.messages import MAX_EPOCH, Join, Kind, Note, Orders, own_version
from llmstack_parallel.hosts.network import FailedHandshakes, Network, free_address, listening_address
from llmstack_parallel.hosts.nodes import Nodes
from llmstack_parallel.messages import MeetMessage, decode, encode
from llmstack_parallel.protocols import Channel, Exchange
from llmstack_parallel.rank_loop import START_TIMEOUT_S
from llmstack_parallel.topology import Topology
from llmstack_types import EngineStartError, ModelRunnerConfig

logger = logging.getLogger(__name__)

_POLL_MS: Final = 100
_FAREWELL_MS: Final = 3000  # the last message says why a node is refused
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
        self.epoch = 1 + secrets.randbelow(MAX_EPOCH - 1)
        self.channels: dict[int, Channel] = {}
        self._lost: str | None = None
        self._is_over = False
        self._ranks: LocalRanks | None = None
        self._end_nodes: Callable[[], None] = lambda: None
        self._wake, self._woken = socket.socketpair()
        self._watcher: threading.Thread | None = None
        self._exchange: Exchange | None = None
        own = Join(own_version(), 0, own_name(), facts_of(config))
        self._network = Network(self._placement)
        try:
            self._socket, self.address = self._network.listen(zmq.ROUTER, listening_address(self._placement))
            self._socket.setsockopt(zmq.LINGER, _FAREWELL_MS)
            self._nodes = Nodes(self._socket, self._placement, own)
            if place is not None:
                self._end_nodes = place(self.address)
            self._wait_for_nodes()
            self.exchange: Exchange = self._start()
        except BaseException as error:
            self.stop(is_over=not isinstance(error, LostRankError))
            raise

    def _wait_for_nodes(self) -> None:
        failures = FailedHandshakes(self._socket)
        try:
            self._admit_nodes(failures)
        finally:
            failures.close()

    def _admit_nodes(self, failures: FailedHandshakes) -> None:
        began_s, has_hinted, has_failed = monotonic(), False, False
        while self._nodes.missing:
            if failures.take() and not has_failed:  # no reason to end: anyone who reaches the port can cause it
                has_failed = True
                logger.error("a machine with different keys, or none, has tried to join node 0 at %s", self.address)
            waited_s = monotonic() - began_s
            missing = ", ".join(map(str, self._nodes.missing))
            if waited_s > START_TIMEOUT_S:
                raise EngineStartError(f"node {missing} has not joined {self.address} within {START_TIMEOUT_S:g} s")
            if waited_s > HINT_S and not has_hinted:
                has_hinted = True
                logger.warning("waiting at %s for node %s: is it there, with the same key file?", self.address, missing)
            if not self._socket.poll(_POLL_MS):
                continue
            received = self._nodes.receive()
            if received is None:
                continue
            sender, message = received
            if isinstance(message, Join):
                self._nodes.admit(sender, message)
            elif isinstance(message, Note) and message.kind is Kind.ALIVE:
                self._nodes.send(sender, Note(Kind.OVER))  # it belongs to ranks that were there before

    def _start(self) -> Exchange:
        """Starts all ranks, and introduces them to each other."""
        config, per_node = self._config, self._config.num_local_ranks
        rank_to_address: dict[int, str] = {}
        for rank in self._topology.peers:
            bound, rank_to_address[rank] = self._network.listen(zmq.PAIR, free_address(self.address))
            self.channels[rank] = ZmqChannel(bound)
        orders = list(rank_to_address.items())
        for number, node in self._nodes.by_number.items():
            ranks = range(number * per_node, (number + 1) * per_node)
            self._nodes.send(node.sender, Orders(self.epoch, tuple((rank, rank_to_address[rank]) for rank in ranks)))
        self._ranks = ranks_here = LocalRanks(config, self.epoch, orders[: per_node - 1])
        segments = ranks_here.segments(0)
        self._watcher = threading.Thread(target=self._watch, name="nodes", daemon=True)
        self._watcher.start()
        meeting = Meeting(self._network, config, 0, self.epoch, free_address(self.address))
        links = {0: meeting.link} | {rank: self._receive_link(rank).link for rank in self.channels}
        store, store_address = make_store(config)
        for rank, channel in self.channels.items():
            channel.send(encode(self.epoch, MeetMessage(self._next_link(rank, links), store_address)))
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
        message = decode(self.epoch, frame)
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

        `is_over`: For good; otherwise the other nodes are asked to join again.
        """
        self._is_over = is_over
        if self._network.context.closed:
            return
        self._wake.close()
        if self._watcher is None:
            self._say_goodbye()
        else:
            self._watcher.join()
        self._woken.close()
        if self._ranks is not None:
            self._ranks.stop()
        self._end_nodes()
        self._network.close()

    def _say_goodbye(self) -> None:
        if hasattr(self, "_nodes"):
            self._nodes.tell_all(Note(Kind.END if self._is_over else Kind.OVER))

    def _watch(self) -> None:
        """Answers signs of life, and notices a node or a rank that gives none. The only user of its socket."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        fds = [] if self._ranks is None else self._ranks.fds
        for fd in [*fds, self._woken.fileno()]:
            poller.register(fd, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(self._placement.silence_s * 1000 / NUM_LOOKS) + 1))
            if self._woken.fileno() in ready:
                self._say_goodbye()
                return
            if self._socket in ready:
                self._read()
            for fd in fds:
                if fd in ready and self._ranks is not None:
                    poller.unregister(fd)
                    self._lose(self._ranks.describe_loss(fd))
            for number in self._nodes.missing:
                node = self._nodes.by_number[number]
                self._lose(f"{node.describe()} has given no sign of life for {self._placement.silence_s:g} s")

    def _read(self) -> None:
        received = self._nodes.receive()
        if received is None:
            return
        sender, message = received
        node = self._nodes.note_sign(sender)
        if isinstance(message, Join):
            if node is None:
                self._nodes.refuse_for_now(sender, message)
            elif node.has_orders:
                self._lose(f"{node.describe()} has lost the connection")
        elif isinstance(message, Note) and message.kind is Kind.ALIVE:
            is_ours = node is not None and message.epoch == self.epoch
            if node is not None and is_ours:
                node.has_orders = True
            self._nodes.send(sender, Note(Kind.ALIVE if is_ours else Kind.OVER, message.epoch))
        elif isinstance(message, Note) and node is not None and message.epoch in (0, self.epoch):
            how = message.text if message.kind is Kind.LOST else "it was stopped"
            self._lose(f"{node.describe()}: {how}")

    def _lose(self, how: str) -> None:
        if self._lost is None:
            self._lost = how
            logger.error("%s", how)
            if self._exchange is not None:
                self._exchange.abort()
