"""Node 0's view of the others: who has joined, who fits, who is alive."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from time import monotonic

import zmq

from llmstack_engine_core.ipc.fields import CodecError
from llmstack_parallel.hosts.facts import difference
from llmstack_parallel.hosts.messages import Join, Kind, NodeMessage, Note, own_version, pack, unpack
from llmstack_types import EngineStartError, RankPlacement

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Node:
    """A node that has joined.

    Attributes:
        sender: The sender of its messages.
        last_sign_s: When it last gave a sign of life.
        has_orders: It has said so; until then, earlier wishes to join may still arrive.
    """

    sender: bytes
    join: Join
    last_sign_s: float
    has_orders: bool = False

    def describe(self) -> str:
        """Its name in messages."""
        return f"node {self.join.node} on {self.join.host}"


class Nodes:
    """All nodes but this one; used by one thread at a time.

    Attributes:
        by_number: The nodes that have joined.
    """

    def __init__(self, socket: zmq.Socket[bytes], placement: RankPlacement, own: Join) -> None:
        self._socket, self._placement, self._own = socket, placement, own
        self.by_number: dict[int, Node] = {}

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined, or have gone since."""
        oldest_s = monotonic() - self._placement.silence_s
        numbers = range(1, self._placement.num_nodes)
        return [
            number
            for number in numbers
            if number not in self.by_number or self.by_number[number].last_sign_s < oldest_s
        ]

    def receive(self) -> tuple[bytes, NodeMessage] | None:
        """The next message and its sender; None where that is none, and its sender gets an answer."""
        sender, *frames = self._socket.recv_multipart()
        try:
            return sender, unpack(b"".join(frames))
        except CodecError as error:
            logger.warning("refused a message of another node: %s", error)
            self.send(sender, Note(Kind.REFUSED, text=f"node 0 runs llmstack {self._own.version}: {error}"))
            return None

    def send(self, sender: bytes, message: NodeMessage) -> None:
        """Sends to one node; it is dropped where that is gone."""
        self._socket.send_multipart([sender, pack(message)], zmq.NOBLOCK)

    def tell_all(self, message: Note) -> None:
        """Sends to all nodes that have joined."""
        for node in self.by_number.values():
            self.send(node.sender, message)

    def admit(self, sender: bytes, join: Join) -> None:
        """Takes a node in, which then waits; also one that asks again.

        Raises:
            EngineStartError: It does not fit; all nodes get the sentence.
        """
        problem = self._problem(join)
        if problem:
            self.send(sender, Note(Kind.REFUSED, text=problem))
            self.tell_all(Note(Kind.REFUSED, text=problem))
            raise EngineStartError(problem)
        held = self.by_number.get(join.node)
        if held is not None and held.sender != sender and join.node not in self.missing:
            self.refuse_for_now(sender, join)
            return
        if held is None or held.sender != sender:
            logger.info("node %d on %s has joined", join.node, join.host)
        self.by_number[join.node] = Node(sender, join, monotonic())
        self.send(sender, Note(Kind.WAIT))

    def refuse_for_now(self, sender: bytes, join: Join) -> None:
        """Tells a node that another one has its number."""
        held = self.by_number.get(join.node)
        if held is not None:
            text = f"node {join.node} is on {held.join.host} already, and on {join.host}"
            self.send(sender, Note(Kind.ASK_AGAIN, text=text))

    def note_sign(self, sender: bytes) -> Node | None:
        """Notes a sign of life; None where its node has not joined."""
        node = next((node for node in self.by_number.values() if node.sender == sender), None)
        if node is not None:
            node.last_sign_s = monotonic()
        return node

    def _problem(self, join: Join) -> str:
        """Why a node does not fit; empty where it does."""
        own = self._own
        where = f"node 0 on {own.host} and node {join.node} on {join.host} differ"
        if join.version != own_version():
            return f"{where}: version is {own.version}, but {join.version}"
        found = difference(own.facts, join.facts)
        if found:
            return f"{where}: {found}"
        if not 0 < join.node < self._placement.num_nodes:
            return f"{where}: --nnodes is {self._placement.num_nodes}, but --node-rank is {join.node}"
        return ""
