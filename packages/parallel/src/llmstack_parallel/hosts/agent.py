"""The process of a node but node 0: it joins that one and starts its ranks.

It joins again where the ranks have ended and others are about to start, and ends with node 0.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Final

import zmq

from llmstack_engine_core.ipc.addresses import interface_address
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_parallel.hosts.facts import facts_of, own_name
from llmstack_parallel.hosts.local_ranks import LocalRanks
from llmstack_parallel.hosts.meeting import is_group_local, placement_of
from llmstack_parallel.hosts.messages import Join, Kind, NodeMessage, Note, Orders, own_version, pack, unpack
from llmstack_parallel.hosts.network import FailedHandshakes, Network
from llmstack_types import EngineStartError, ModelRunnerConfig

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5
HINT_S: Final = 10.0
REJOIN_S: Final = 60.0
"""How long node 0 may be away while it replaces an engine core that has crashed."""

MAX_QUEUED: Final = 8  # while node 0 is away: later messages would be repetitions
NUM_SIGNS: Final = 4  # of life, within the time without which a node counts as lost
NUM_REFUSALS: Final = 4  # of that time, until a node that cannot join now gives up
NUM_FAILED_HANDSHAKES: Final = 5


class NodeAgent:
    """Hosts the ranks of one node until node 0 ends; used by one thread.

    Attributes:
        ranks: The running ranks; None while node 0 waits for nodes, or is away.
    """

    def __init__(self, config: ModelRunnerConfig, patience_s: float, wake_fd: int | None = None) -> None:
        """`patience_s`: How long node 0 may take to be there at the start; `wake_fd`: becomes readable to end this.

        Raises:
            EngineStartError: The keys, the model's files or the network interface cannot be used.
        """
        self._config = config
        self._placement = placement = placement_of(config)
        self._where = f"node 0 at {placement.address}"
        if config.tensor_parallel_size > 1 and not is_group_local(config):
            interface_address(placement.interface)  # it is there
        facts = facts_of(config)
        self._join = Join(own_version(), placement.node, own_name(), facts)
        self._network = Network(placement)
        self._socket = self._network.connect(zmq.DEALER, placement.address, MAX_QUEUED)
        self._failures = FailedHandshakes(self._socket)
        self._wake_fd = wake_fd
        self._patience_s = patience_s
        self.ranks: LocalRanks | None = None
        self._epoch = 0
        self._last_sign_s = self._refused_s = monotonic()
        self._num_failures = 0
        self._is_over = self._has_hinted = False

    def run(self) -> None:
        """Returns when node 0 has ended on purpose, or this node was asked to end.

        Raises:
            EngineStartError: Node 0 refuses this one, or has been away for too long.
        """
        next_sign_s = 0.0
        try:
            while not self._is_over:
                now_s = monotonic()
                self._check_silence(now_s)
                if now_s >= next_sign_s:
                    self._send(Note(Kind.ALIVE, self._epoch) if self._epoch else self._join)
                    next_sign_s = now_s + (self._placement.silence_s / NUM_SIGNS if self._epoch else RETRY_S)
                self._wait(max(0.0, next_sign_s - now_s))
        finally:
            self._end_ranks()
            self._send(Note(Kind.LEAVE))
            self._failures.close()
            self._network.close()

    def _wait(self, timeout_s: float) -> None:
        poller = zmq.Poller()
        for watched in (self._socket, self._failures.events):
            poller.register(watched, zmq.POLLIN)
        fds = [] if self.ranks is None else self.ranks.fds
        for fd in [*fds, *([] if self._wake_fd is None else [self._wake_fd])]:
            poller.register(fd, zmq.POLLIN)
        ready = dict(poller.poll(int(timeout_s * 1000) + 1))
        if self._wake_fd in ready:
            self._is_over = True
            return
        if self._failures.events in ready:
            self._note_failures()
        ended = next((fd for fd in fds if fd in ready), None)
        if ended is not None and self.ranks is not None:
            self._lose(self.ranks.describe_loss(ended))
        if self._socket in ready:
            self._receive_all()

    def _receive_all(self) -> None:
        while self._socket.poll(0) and not self._is_over:
            try:
                message = unpack(self._socket.recv())
            except CodecError as error:
                raise EngineStartError(f"{self._where} and this node cannot talk: {error}") from error
            self._last_sign_s, self._num_failures = monotonic(), 0
            self._handle(message)

    def _handle(self, message: NodeMessage) -> None:
        if isinstance(message, Orders):
            self._start(message)
        elif not isinstance(message, Note):
            raise EngineStartError(f"{self._where} has sent a {type(message).__name__}")
        elif message.kind is Kind.REFUSED:
            raise EngineStartError(message.text)
        elif message.kind is Kind.ASK_AGAIN:
            if monotonic() - self._refused_s > NUM_REFUSALS * self._placement.silence_s:
                raise EngineStartError(message.text)
        elif message.kind is Kind.END:
            logger.info("%s has ended", self._where)
            self._is_over = True
        elif message.kind is Kind.OVER:
            self._forget("ranks start again")
        if not isinstance(message, Note) or message.kind is not Kind.ASK_AGAIN:
            self._refused_s = monotonic()

    def _start(self, orders: Orders) -> None:
        self._end_ranks()
        self._epoch, self._patience_s = orders.epoch, REJOIN_S
        ranks = ", ".join(str(rank) for rank, _ in orders.ranks)
        logger.info("joined %s with ranks %s of %d", self._where, ranks, self._config.num_ranks)
        self.ranks = LocalRanks(self._config, orders.epoch, orders.ranks)
        self.ranks.close_segments()

    def _lose(self, how: str) -> None:
        logger.error("%s", how)
        self._send(Note(Kind.LOST, self._epoch, how))
        self._forget("a rank has ended")

    def _forget(self, why: str) -> None:
        """Ends the ranks; the next sign of life is a wish to join."""
        if self._epoch:
            logger.warning("%s; asking %s again", why, self._where)
        self._end_ranks()
        self._epoch = 0
        self._last_sign_s = self._refused_s = monotonic()

    def _end_ranks(self) -> None:
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.stop()

    def _check_silence(self, now_s: float) -> None:
        silent_s = now_s - self._last_sign_s
        if self._epoch and silent_s > self._placement.silence_s:
            self._forget(f"no sign of life of {self._where}")
        elif not self._epoch and silent_s > self._patience_s:
            raise EngineStartError(f"{self._where} has not answered, or has other keys, for {self._patience_s:g} s")
        elif not self._epoch and silent_s > HINT_S and not self._has_hinted:
            self._has_hinted = True
            logger.warning("no answer from %s: is it there, with the same key file?", self._where)

    def _note_failures(self) -> None:
        """Counts handshakes that fail one after the other: the keys do not fit."""
        self._num_failures += self._failures.take()
        if self._num_failures > NUM_FAILED_HANDSHAKES:
            raise EngineStartError(f"{self._where} and this node have different keys")

    def _send(self, message: NodeMessage) -> None:
        if self._socket.poll(0, zmq.POLLOUT):
            self._socket.send(pack(message), zmq.NOBLOCK)


def run_node(config: ModelRunnerConfig, patience_s: float, on_start: Callable[[], None] | None = None) -> int:
    """Hosts the ranks of this node, until node 0 has ended or a signal comes (exit code 0).

    `on_start`: Called when signals are handled.

    Raises:
        EngineStartError: Node 0 refuses this one, or is not there.
    """
    with _signals_as_descriptor() as fd:
        if on_start is not None:
            on_start()
        NodeAgent(config, patience_s, fd).run()
    return 0


@contextmanager
def _signals_as_descriptor() -> Iterator[int]:
    """A descriptor that becomes readable when this process is asked to end."""
    ours, theirs = socket.socketpair()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def on_signal(number: int, frame: FrameType | None) -> None:
        os.write(theirs.fileno(), b"\0")

    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield ours.fileno()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
