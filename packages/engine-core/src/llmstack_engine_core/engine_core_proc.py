"""The loop of an engine core's process, with clients over one ZeroMQ socket."""

from __future__ import annotations

import contextlib
import logging
import secrets
from functools import partial

import zmq

from llmstack_engine_core.admission import error_output
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.engine_loop import EngineLoop
from llmstack_engine_core.ipc.long_frames import Decoded, LongFrames, decode
from llmstack_engine_core.ipc.sockets import has_message
from llmstack_engine_core.messages.control import ControlCall, ControlResult
from llmstack_engine_core.messages.kinds import CodecError
from llmstack_engine_core.messages.protocol import (
    CLIENT_MESSAGES,
    ENGINE_MESSAGES,
    EngineMessage,
    Goodbye,
    Hello,
    StartFailed,
    encode_in_parts,
)
from llmstack_engine_core.progress import SharedProgress
from llmstack_types import Control, EngineCoreOutputs

logger = logging.getLogger(__name__)

# Between two steps no more than this is read, so that a flood of messages cannot stop the running requests.
MAX_MESSAGES_PER_STEP = 4096
# Clients of one engine core start together; the first may be faster than the others.
FURTHER_REFUSALS_WAIT_MS = 300
# Waking up reads the weights again; the watch over progress waits for 20 times of this.
LONG_OPERATION_S = 30.0
# How long an idle engine core waits for a long message that is being decoded, before it looks again.
DECODING_WAIT_MS = 1
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _LAST
_UNSENDABLE = "The output is too large to be sent."


class EngineCoreProc(EngineLoop):
    """An engine core behind a ROUTER socket; a client's identity is that of its socket."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], progress: SharedProgress | None = None) -> None:
        """`progress`: Where idle rounds are noted, and operations that take long; the steps note themselves."""
        super().__init__(core)
        self._progress = progress
        self._socket = socket
        self._epoch = secrets.randbits(32)
        self._num_refused = 0
        self._long = LongFrames()
        self._gone: set[bytes] = set()  # without a goodbye that has been read
        self._poller = zmq.Poller()  # `socket.poll` would make one each time
        self._poller.register(socket, zmq.POLLIN)

    def _receive(self, wait_ms: int) -> bool:
        has_any = self._read_messages(min(wait_ms, DECODING_WAIT_MS) if self._long.is_waiting else wait_ms)
        for client, decoded in self._long.take() if self._long.is_waiting else ():
            self._receive_message(client, decoded)
            has_any = True
        for client in [client for client in self._gone if not self._long.holds(client)]:
            logger.warning("lost %s: it has gone without a goodbye", client[:64])
            self._gone.discard(client)
        return has_any

    def _read_messages(self, wait_ms: int) -> bool:
        if wait_ms and self._progress is not None:  # it is idle
            self._progress.advance()
        if wait_ms and not self._poller.poll(wait_ms):
            return False
        for num_messages in range(MAX_MESSAGES_PER_STEP):
            if self._long.is_full or not has_message(self._socket):
                return num_messages > 0
            client, *frames = self._socket.recv_multipart()
            if not self._long.hold(client, frames, is_busy=not wait_ms):
                self._receive_frames(client, frames)
        return True

    def _receive_frames(self, client: bytes, frames: list[bytes]) -> None:
        self._receive_message(client, partial(decode, frames))

    def _receive_message(self, client: bytes, decoded: Decoded) -> None:
        try:
            message = decoded()
        except CodecError as error:
            self._num_refused += 1
            if self._num_refused & (self._num_refused - 1) == 0:  # the first, then ever fewer
                logger.warning("refused a message of %s, the %dth: %s", client[:64], self._num_refused, error)
            if error.request_id is not None and client in self._clients:
                self._refuse(client, error.request_id, str(error))
            return
        if client in self._gone and not isinstance(message, Hello):
            if isinstance(message, Goodbye):
                self._gone.discard(client)
            return
        if isinstance(message, ControlCall) and message.operation == Control.SHUTDOWN:
            # The process ends with the one that started it, by its signal; a client has no say in that.
            logger.warning("refused to end for %s", client[:64])
            self._send(client, ControlResult(message.call_id, message.operation, False))
            return
        if isinstance(message, ControlCall) and self._progress is not None:
            self._progress.advance(LONG_OPERATION_S)
        self._handle(client, message)

    def _send(self, client: bytes, message: EngineMessage) -> None:
        try:
            frames = encode_in_parts(message, self._epoch)
        except CodecError as error:
            if not isinstance(message, EngineCoreOutputs):
                raise
            self._send_separately(client, message, error)
            return
        try:
            for frame in frames:
                # `send_multipart` would combine the flags in Python at each step.
                self._socket.send(client, _MORE)
                self._socket.send(frame, _LAST)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:  # its goodbye may still be unread
                self._gone.add(client)
            else:  # it has left thousands of messages unread
                logger.warning("lost %s: %s", client[:64], error.strerror)
            self._drop(client)

    def _send_separately(self, client: bytes, message: EngineCoreOutputs, error: CodecError) -> None:
        """Sends one output at a time; the request whose output no message can carry ends with an error."""
        if len(message.outputs) > 1:
            for output in message.outputs:
                self._send(client, EngineCoreOutputs([output], message.timestamp_s))
            self._send(client, message._replace(outputs=[]))
            return
        if not message.outputs:
            raise error
        request_id = message.outputs[0].request_id
        logger.error("the output of request %s cannot be sent: %s", request_id[:64], error)
        self._abort([request_id])
        self._send(client, EngineCoreOutputs([error_output(request_id, _UNSENDABLE)], message.timestamp_s))


def refuse_clients(socket: zmq.Socket[bytes], reason: str, wait_ms: int) -> None:
    """Tells the clients that say hello why there is no engine core; waits so long for the first."""
    while socket.poll(wait_ms):
        client, *frames = socket.recv_multipart()
        try:
            message = CLIENT_MESSAGES.decode(frames[0])[1] if len(frames) == 1 else None
        except CodecError:
            continue
        if isinstance(message, Hello):
            with contextlib.suppress(zmq.ZMQError):  # it has left meanwhile
                socket.send_multipart([client, ENGINE_MESSAGES.encode(StartFailed(reason))])
            wait_ms = FURTHER_REFUSALS_WAIT_MS
