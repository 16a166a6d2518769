"""The first machine's list of the others: which are welcome, and which are there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import zmq

from llmstack_engine_client.hosts.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGES,
    Answer,
    Facts,
    Join,
    Leave,
    Message,
    own_version,
)
from llmstack_engine_client.hosts.network import FAILED_HANDSHAKES, FirstMachine, Network, is_failed_handshake
from llmstack_engine_core.ipc.addresses import check_address
from llmstack_engine_core.ipc.sockets import has_message
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

FAREWELL_MS: Final = 1000  # the last message says why a machine is refused


class Members:
    """Listens for the other machines. Used by one thread at a time.

    Every machine is welcome that agrees in all facts, and whose numbers no other one has.

    Attributes:
        joined: The machines that have joined, by the senders of their messages.
        address: Where it listens.
        is_closed_to: Why a machine that would be welcome has to ask again; empty where it need not.
    """

    def __init__(self, first: FirstMachine, noun: str, numbers: range, facts: Facts) -> None:
        """Listens from now on.

        Args:
            first: This machine.
            noun: What has the numbers: an engine core, or a node.
            numbers: Those of the other machines.
            facts: What must be equal on all.

        Raises:
            EngineStartError: The address cannot be listened on, or there is no key for it.
        """
        self._first, self._noun, self._numbers, self._facts = first, noun, numbers, facts
        self.joined: dict[bytes, Join] = {}
        self.is_closed_to = ""
        self._has_warned = False
        self._network = Network(first.key_file, MAX_MESSAGE_BYTES)
        try:
            socket, self.address = self._network.listen(zmq.ROUTER, first.address, first.timeout_s)
        except EngineStartError:
            self._network.close()
            raise
        socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket = socket
        self._failures = socket.get_monitor_socket(FAILED_HANDSHAKES)

    @property
    def sockets(self) -> Sequence[zmq.Socket[bytes]]:
        """With a message on one of them there is something to read."""
        return self._socket, self._failures

    def read(self) -> Iterator[tuple[bytes, Join, Message]]:
        """The messages that have come, with the machines and their senders; does not wait.

        A `Join` is from a machine that is welcome and knows it. In place of the others' comes the `Answer` to them.
        """
        while has_message(self._failures):
            self._note_failure(self._failures.recv_multipart())
        while has_message(self._socket):
            sender, *frames = self._socket.recv_multipart()
            message = self._unpacked(sender, frames)
            if isinstance(message, Join):
                answer = self._answer_to(sender, message)
                self.send(sender, answer)
                if answer.refusal:
                    level = logging.WARNING if answer.is_final else logging.INFO
                    logger.log(level, "refused %s: %s", message.host, answer.refusal)
                    yield sender, message, answer
                else:
                    self.joined[sender] = message
                    yield sender, message, message
            elif message is not None and sender in self.joined:
                join = self.joined[sender]
                if isinstance(message, Leave):
                    del self.joined[sender]
                yield sender, join, message

    def _note_failure(self, event: list[bytes]) -> None:
        """Says once that keys differ: it is no reason to end, since anyone who reaches the port can cause it."""
        if is_failed_handshake(event) and not self._has_warned:
            self._has_warned = True
            logger.error("a machine with different keys, or none, has tried to join %s", self.address)

    def _unpacked(self, sender: bytes, frames: list[bytes]) -> Message | None:
        try:
            return MESSAGES.decode(b"".join(frames))[1]
        except CodecError as error:
            logger.warning("refused a message of another machine: %s", error)
            self.send(sender, Answer(f"{self._first.name} runs llmstack {own_version()}: {error}"))
            return None

    def _answer_to(self, sender: bytes, join: Join) -> Answer:
        if problem := self._problem(join):
            return Answer(problem)
        for other, joined in list(self.joined.items()):
            if other == sender or joined.generation != join.generation or not have_common(joined, join):
                continue
            # A machine that rejoins may be faster than the notice of its end.
            if not self.is_closed_to and not self.is_there(other):
                del self.joined[other]
                continue
            shared = max(joined.number, join.number)
            text = f"{self._noun} {shared} is on {joined.host} already, and on {join.host}"
            return Answer(text, is_final=False)
        return Answer(self.is_closed_to, is_final=False)

    def _problem(self, join: Join) -> str:
        """Why a machine cannot join; empty where it can."""
        if found := difference(self._facts, join.facts):
            return f"{self._first.name} and {describe(self._noun, join)} differ: {found}"
        numbers, last = self._numbers, join.numbers[-1]
        if join.number not in numbers or last not in numbers:
            allowed = f"{self._noun}s {numbers.start} to {numbers.stop - 1}"
            return f"other machines than the first have {allowed}, but {join.host} has {join.number} to {last}"
        try:
            for address in join.addresses:
                check_address(address, is_remote=True)
        except EngineStartError as error:
            return str(error)
        return ""

    def send(self, sender: bytes, message: Message) -> bool:
        """Whether the machine is there; one that has gone will ask again. It is sent at once, or not at all."""
        try:
            self._socket.send_multipart([sender, MESSAGES.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def is_there(self, sender: bytes) -> bool:
        """Whether a machine has a connection, which ends without a sign of life."""
        return self.send(sender, Answer())

    def close(self, *, is_over: bool = True) -> None:
        """Ends the connections. `is_over`: Tells the machines that it is for good; otherwise they ask again."""
        for sender in self.joined if is_over else ():
            self.send(sender, Leave())
        self._socket.disable_monitor()
        self._failures.close(0)
        self._network.close()


def difference(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> str:
    """The first fact that differs, as `NAME is A, but B`; empty where all are equal."""
    own, other = dict(ours), dict(theirs)
    for name in [*own, *(name for name in other if name not in own)]:
        first, second = own.get(name, "unknown"), other.get(name, "unknown")
        if first != second:
            return f"{name} is {first or 'empty'}, but {second or 'empty'}"
    return ""


def describe(noun: str, join: Join) -> str:
    """A machine in messages, with its first number."""
    return f"{noun} {join.number} on {join.host}"


def have_common(join: Join, other: Join) -> bool:
    """Whether two machines have the same number."""
    return join.number < other.numbers.stop and other.number < join.numbers.stop
