"""The side of a machine that joins the first one, and rejoins it after a break."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable
from time import monotonic

import zmq
import zmq.asyncio

from llmstack_engine_core.config import HostsConfig
from llmstack_engine_core.hosts.messages import MAX_MESSAGE_BYTES, Answer, Join, Leave, Load, LoadFailed, pack, unpack
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.keys import Keys, keys_for
from llmstack_engine_core.ipc.sockets import RECONNECT_MS, set_heartbeats, use_keys

logger = logging.getLogger(__name__)

FAREWELL_MS = 200
RETRY_S = 0.5
# Without an answer for so long, the log says what to look at.
HINT_S = 10.0
# It notices the end of a machine after one time-out; this machine asks for a few.
NUM_TIMEOUTS = 4
# Handshakes that may fail for another reason than the keys, such as a first machine that ends.
NUM_FAILURES = 5
_FAILED_HANDSHAKES = (
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
)
_EVENTS = int(zmq.EVENT_DISCONNECTED) | sum(_FAILED_HANDSHAKES)
_EVENT = struct.Struct("=HI")


class JoinRefusedError(Exception):
    """The first machine refuses this one, or has not been there for too long; the text is one sentence."""


class _AskAgainError(Exception):
    """The first machine has not noticed yet that an earlier one with these engine cores is gone."""


class Joining:
    """Keeps this machine joined, until the first one ends on purpose or refuses it."""

    def __init__(
        self,
        hosts: HostsConfig,
        key_file: str | None,
        patience_s: float,
        on_load: Callable[[Load], None] = lambda load: None,
    ) -> None:
        """`patience_s`: How long the first machine may be away; `on_load`: Starts further engine cores.

        Raises:
            EngineStartError: The key file cannot be used.
        """
        self._hosts = hosts
        self._keys: Keys | None = keys_for(hosts.address, key_file)
        self._patience_s = patience_s
        self._on_load = on_load
        self._socket: zmq.asyncio.Socket | None = None
        self._num_attempts = self._num_refusals = self._num_failures = 0

    @property
    def server_key(self) -> bytes:
        """The public key by which the engine cores of this machine are known."""
        return b"" if self._keys is None else self._keys.public

    def tell(self, message: LoadFailed) -> None:
        """Tells the first machine, where it is there."""
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(pack(message), zmq.NOBLOCK)

    async def run(self, join: Join) -> None:
        """Returns when the first machine ends on purpose.

        Raises:
            JoinRefusedError: It refuses this machine, or has been away for too long.
        """
        last_s, has_hinted, was_joined = monotonic(), False, False
        context = zmq.asyncio.Context()
        try:
            while monotonic() - last_s < self._patience_s:
                is_over, was_answered = await self._stay(context, join)
                if is_over:
                    return
                if was_answered:
                    last_s, has_hinted, was_joined = monotonic(), False, True
                    logger.warning("the first machine at %s is away; asking again", self._hosts.address)
                elif not has_hinted and monotonic() - last_s > HINT_S:
                    has_hinted = True
                    logger.warning("no answer from %s: is it there, with the same key file?", self._hosts.address)
                await asyncio.sleep(RETRY_S)
        finally:
            context.destroy(linger=FAREWELL_MS)
        how = "has been away" if was_joined else "has not answered, or has other keys,"
        raise JoinRefusedError(f"the first machine at {self._hosts.address} {how} for {self._patience_s:g} s")

    async def _stay(self, context: zmq.asyncio.Context, join: Join) -> tuple[bool, bool]:
        """One connection: whether the first machine has ended on purpose, and whether it has answered."""
        socket = self._socket = self._connect(context)
        monitor = socket.get_monitor_socket(_EVENTS)
        was_answered = False
        try:
            await socket.send(pack(join))
            gone = asyncio.ensure_future(monitor.recv_multipart())
            try:
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
                        logger.info("joined %s with engine cores %s", self._hosts.address, _described(join.ranks))
                    was_answered, self._num_failures = True, 0
            finally:
                gone.cancel()
        except _AskAgainError:
            return False, False
        except asyncio.CancelledError:  # this machine ends
            with contextlib.suppress(zmq.ZMQError):
                socket.send(pack(Leave()), zmq.NOBLOCK)
            raise
        finally:
            self._socket = None
            socket.disable_monitor()
            monitor.close(0)
            socket.close(FAREWELL_MS)

    def _note_end(self, gone: asyncio.Future[list[bytes]]) -> None:
        """Counts handshakes that fail one after the other: the keys do not fit."""
        if not gone.done() or _EVENT.unpack_from(gone.result()[0])[0] not in _FAILED_HANDSHAKES:
            return
        self._num_failures += 1
        if self._num_failures > NUM_FAILURES:
            raise JoinRefusedError(f"the first machine at {self._hosts.address} and this one have different keys")

    def _connect(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        set_heartbeats(socket, self._hosts.heartbeat_timeout_s)
        if self._keys is not None:
            # While keys are replaced, the first machine may have the other one in use.
            accepted = self._keys.accepted
            use_keys(socket, self._keys, accepted[self._num_attempts % len(accepted)])
            self._num_attempts += 1
        socket.connect(self._hosts.address)
        return socket

    def _is_end(self, frame: bytes) -> bool:
        try:
            message = unpack(frame)
        except CodecError as error:
            raise JoinRefusedError(f"the first machine at {self._hosts.address}: {error}") from error
        if isinstance(message, Answer) and message.refusal:
            self._num_refusals += 1
            if message.is_final or self._num_refusals * RETRY_S > NUM_TIMEOUTS * self._hosts.heartbeat_timeout_s:
                raise JoinRefusedError(message.refusal)
            raise _AskAgainError
        self._num_refusals = 0
        if isinstance(message, Load):
            self._on_load(message)
        return isinstance(message, Leave)


def _described(ranks: range) -> str:
    return ", ".join(map(str, ranks))
