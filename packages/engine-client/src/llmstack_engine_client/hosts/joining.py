"""The side of a machine that joins the first one, and rejoins it after a break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import zmq
import zmq.asyncio

from llmstack_engine_client.hosts.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGES,
    Answer,
    Join,
    Leave,
    Message,
    Start,
)
from llmstack_engine_client.hosts.network import (
    FAILED_HANDSHAKES,
    LINGER_MS,
    FirstMachine,
    Network,
    is_failed_handshake,
)
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5
# Without an answer for so long, the log says what to look at.
HINT_S: Final = 10.0
# It notices the end of a machine after one time-out; this machine asks for a few.
NUM_TIMEOUTS: Final = 4
# Handshakes that may fail for another reason than the keys, such as a first machine that ends.
NUM_FAILURES: Final = 5


class JoinRefusedError(EngineStartError):
    """The first machine refuses this one, or has not been there for too long; the text is one sentence."""


class _AskAgainError(Exception):
    """The first machine cannot take this one yet."""


class Joining:
    """Keeps this machine joined, until the first one ends on purpose or refuses it."""

    def __init__(
        self,
        first: FirstMachine,
        patience_s: float,
        rejoin_s: float | None = None,
        on_start: Callable[[Start], None] = lambda start: None,
        on_break: Callable[[], None] = lambda: None,
    ) -> None:
        """Reads the keys.

        Args:
            first: Where to join.
            patience_s: How long the first machine may take to be there.
            rejoin_s: How long it may be away later; as long by default.
            on_start: Starts engine cores or ranks.
            on_break: Called where the connection ends, before this machine asks again.

        Raises:
            EngineStartError: The key file cannot be used.
        """
        self._first, self._where = first, f"{first.name} at {first.address}"
        self._context = zmq.asyncio.Context()
        self._network = Network(first.key_file, MAX_MESSAGE_BYTES, self._context)
        self._patience_s, self._rejoin_s = patience_s, patience_s if rejoin_s is None else rejoin_s
        self._on_start, self._on_break = on_start, on_break
        self._socket: Any = None
        self._num_attempts = self._num_refusals = self._num_failures = 0

    @property
    def server_key(self) -> bytes:
        """The public key by which the engine cores of this machine are known."""
        return self._network.keys.public

    def tell(self, message: Message) -> None:
        """Tells the first machine, where it is there."""
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(MESSAGES.encode(message), zmq.NOBLOCK)

    async def run(self, join: Join) -> None:
        """Returns when the first machine ends on purpose.

        Raises:
            JoinRefusedError: It refuses this machine, or has been away for too long.
        """
        last_s, patience_s, has_hinted = monotonic(), self._patience_s, False
        how = "has not answered, or has other keys,"
        try:
            while monotonic() - last_s < patience_s:
                is_over, was_answered = await self._stay(join)
                if is_over:
                    return
                if was_answered:
                    last_s, patience_s, has_hinted, how = monotonic(), self._rejoin_s, False, "has been away"
                    logger.warning("%s is away; asking again", self._where)
                    self._on_break()
                elif not has_hinted and monotonic() - last_s > HINT_S:
                    has_hinted = True
                    logger.warning("no answer from %s: is it there, with the same key file?", self._where)
                await asyncio.sleep(RETRY_S)
        finally:
            self._network.close()
        raise JoinRefusedError(f"{self._where} {how} for {patience_s:g} s")

    async def _stay(self, join: Join) -> tuple[bool, bool]:
        """One connection: whether the first machine has ended on purpose, and whether it has answered."""
        socket: Any = self._connect()  # of the event loop: what it does is awaited
        self._socket = socket
        monitor = socket.get_monitor_socket(FAILED_HANDSHAKES | int(zmq.EVENT_DISCONNECTED))
        was_answered = False
        linger_ms = 0  # a `Join` that still arrived would be of a connection that has ended
        gone = asyncio.ensure_future(monitor.recv_multipart())
        try:
            await socket.send(MESSAGES.encode(join))
            while True:
                receiving = asyncio.ensure_future(socket.recv())
                timeout_s = None if was_answered else HINT_S
                await asyncio.wait((receiving, gone), return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
                if not receiving.done():
                    receiving.cancel()
                    self._note_end(gone)
                    return False, was_answered
                if self._is_end(receiving.result()):
                    return True, True
                if not was_answered:
                    logger.info("joined %s", self._where)
                was_answered, self._num_failures = True, 0
        except _AskAgainError:
            return False, False
        except (asyncio.CancelledError, EngineStartError):  # this machine ends
            self.tell(Leave())
            linger_ms = LINGER_MS
            raise
        finally:
            self._socket = None
            gone.cancel()
            socket.disable_monitor()
            monitor.close(0)
            socket.close(linger_ms)

    def _note_end(self, gone: asyncio.Future[list[bytes]]) -> None:
        """Counts handshakes that fail one after the other: the keys do not fit."""
        if not gone.done() or not is_failed_handshake(gone.result()):
            return
        self._num_failures += 1
        if self._num_failures > NUM_FAILURES:
            raise JoinRefusedError(f"{self._where} and this machine have different keys")

    def _connect(self) -> zmq.Socket[Any]:
        # While keys are replaced, the first machine may have the other one in use.
        accepted = self._network.keys.accepted
        server_key = accepted[self._num_attempts % len(accepted)]
        self._num_attempts += 1
        return self._network.connect(zmq.DEALER, self._first.address, self._first.timeout_s, server_key=server_key)

    def _is_end(self, frame: bytes) -> bool:
        try:
            message = MESSAGES.decode(frame)[1]
        except CodecError as error:
            raise JoinRefusedError(f"{self._where} and this machine cannot talk: {error}") from error
        if isinstance(message, Answer) and message.refusal:
            self._num_refusals += 1
            if message.is_final or self._num_refusals * RETRY_S > NUM_TIMEOUTS * self._first.timeout_s:
                raise JoinRefusedError(message.refusal)
            raise _AskAgainError
        self._num_refusals = 0
        if isinstance(message, Start):
            self._on_start(message)
        return isinstance(message, Leave)
