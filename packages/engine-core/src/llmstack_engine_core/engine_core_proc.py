"""The loop of an engine core's process, with clients over one ZeroMQ socket."""

from __future__ import annotations

import contextlib
import logging

import zmq

from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.engine_loop import EngineLoop
from llmstack_engine_core.ipc.codec import decode_client_message, encode
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.frames import EngineMessage, Hello, StartFailed
from llmstack_engine_core.ipc.parts import encode_in_parts
from llmstack_engine_core.ipc.sockets import has_message

logger = logging.getLogger(__name__)

# Between two steps no more than this is read, so that a flood of messages cannot stop the running requests.
MAX_MESSAGES_PER_STEP = 4096
# Clients of one engine core start together; the first may be faster than the others.
FURTHER_REFUSALS_WAIT_MS = 300


class EngineCoreProc(EngineLoop):
    """An engine core behind a ROUTER socket; a client's identity is that of its socket."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        super().__init__(core)
        self._socket = socket
        self._poller = zmq.Poller()  # `socket.poll` would make one each time
        self._poller.register(socket, zmq.POLLIN)

    def _receive(self, wait_ms: int) -> None:
        if wait_ms and not self._poller.poll(wait_ms):
            return
        for _ in range(MAX_MESSAGES_PER_STEP):
            if not has_message(self._socket):
                return
            client, *frames = self._socket.recv_multipart()
            self._receive_frames(client, frames)

    def _receive_frames(self, client: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise CodecError(f"a message must have one frame, but has {len(frames)}")
            message = decode_client_message(frames[0])
        except CodecError as error:
            logger.warning("refused a message of %s: %s", client[:64], error)
            if error.request_id is not None and client in self._clients:
                self._refuse(client, error.request_id, str(error))
            return
        self._handle(client, message)

    def _send(self, client: bytes, message: EngineMessage) -> None:
        try:
            for frame in encode_in_parts(message):
                self._socket.send_multipart([client, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # gone, or it has left thousands of messages unread
            logger.warning("lost %s: %s", client[:64], error.strerror)
            self._drop(client)


def refuse_clients(socket: zmq.Socket[bytes], reason: str, wait_ms: int) -> None:
    """Tells the clients that say hello why there is no engine core; waits so long for the first."""
    while socket.poll(wait_ms):
        client, *frames = socket.recv_multipart()
        try:
            message = decode_client_message(frames[0]) if len(frames) == 1 else None
        except CodecError:
            continue
        if isinstance(message, Hello):
            with contextlib.suppress(zmq.ZMQError):  # it has left meanwhile
                socket.send_multipart([client, encode(StartFailed(reason))])
            wait_ms = FURTHER_REFUSALS_WAIT_MS
