"""The loop of an engine core's process: take messages between steps, step while there is work, send what came of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import zmq

from llmstack_engine_core.engine_core import EngineCore, error_output
from llmstack_engine_core.ipc.codec import decode_client_message, encode
from llmstack_engine_core.ipc.fields import CodecError
from llmstack_engine_core.ipc.frames import (
    AbortRequests,
    ClientMessage,
    EngineFailed,
    EngineMessage,
    Hello,
    StartFailed,
    UtilityCall,
    UtilityOperation,
    UtilityResult,
)
from llmstack_engine_core.ipc.sockets import has_message
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    InvalidRequestError,
    SchedulerStats,
)

logger = logging.getLogger(__name__)

# A signal may come between the check for it and the wait, so no wait is endless.
IDLE_WAIT_MS = 500
# Between two steps no more than this is read, so that a flood of messages cannot stop the running requests.
MAX_MESSAGES_PER_STEP = 4096


class EngineCoreProc:
    """An engine core behind a ROUTER socket; single threaded.

    Attributes:
        is_stopping: A client asked for the end.
    """

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self.is_stopping = False
        self._core = core
        self._socket = socket
        self._poller = zmq.Poller()  # `socket.poll` would make one each time
        self._poller.register(socket, zmq.POLLIN)
        self._clients: dict[bytes, None] = {}  # a set would iterate in a different order each time
        self._request_id_to_client: dict[str, bytes] = {}

    def run(self) -> None:
        """Serves until a client asks for the end, or an exception ends it: clients are told, then it goes on up."""
        try:
            while not self.is_stopping:
                self._receive(0 if self._core.has_unfinished_requests() else IDLE_WAIT_MS)
                if self._core.has_unfinished_requests():
                    self._send_outputs(self._core.step())
        except Exception as error:  # whatever it was, the clients must learn of it; it is raised again
            self._broadcast(EngineFailed(f"the engine core failed: {type(error).__name__}; its log says more"))
            raise

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

    def _handle(self, client: bytes, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._clients[client] = None
            self._send(client, self._core.ready)
        elif client not in self._clients:
            logger.warning("refused a message of %s, which has not said hello", client[:64])
        elif isinstance(message, EngineCoreRequest):
            self._add_request(client, message)
        elif isinstance(message, AbortRequests):
            self._abort(request_id for request_id in message.request_ids if self._is_owner(client, request_id))
        else:
            self._send(client, UtilityResult(message.call_id, self._call(message)))

    def _add_request(self, client: bytes, request: EngineCoreRequest) -> None:
        try:
            self._core.add_request(request)
        except InvalidRequestError as error:
            self._refuse(client, request.request_id, error.message)
        else:
            self._request_id_to_client[request.request_id] = client

    def _refuse(self, client: bytes, request_id: str, error: str) -> None:
        if self._is_owner(client, request_id):
            # The client's own earlier request of that id is running, and an error would end that one.
            logger.warning("refused a second request of id %s", request_id[:64])
            return
        self._send(client, EngineCoreOutputs([error_output(request_id, error)]))

    def _is_owner(self, client: bytes, request_id: str) -> bool:
        return self._request_id_to_client.get(request_id) == client

    def _abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if self._request_id_to_client.pop(request_id, None)]
        self._core.abort_requests(known)

    def _call(self, call: UtilityCall) -> bool | SchedulerStats:
        match call.operation:
            case UtilityOperation.RESET_PREFIX_CACHE:
                return self._core.reset_prefix_cache()
            case UtilityOperation.STATS:
                return self._core.stats()
            case UtilityOperation.SHUTDOWN:
                self.is_stopping = True
                return True

    def _send_outputs(self, step: EngineCoreOutputs) -> None:
        outputs_of = self._outputs_by_client(step.outputs)
        for request_id in [output.request_id for output in step.outputs if output.finish_reason is not None]:
            self._request_id_to_client.pop(request_id, None)
        for client in list(self._clients):
            outputs = outputs_of.get(client, [])
            if outputs or step.scheduler_stats is not None:
                self._send(client, EngineCoreOutputs(outputs, step.timestamp_s, step.scheduler_stats))

    def _outputs_by_client(self, outputs: list[EngineCoreOutput]) -> dict[bytes, list[EngineCoreOutput]]:
        if len(self._clients) == 1:
            return dict.fromkeys(self._clients, outputs)
        outputs_of: dict[bytes, list[EngineCoreOutput]] = {}
        for output in outputs:
            client = self._request_id_to_client.get(output.request_id)
            if client is not None:
                outputs_of.setdefault(client, []).append(output)
        return outputs_of

    def _send(self, client: bytes, message: EngineMessage) -> None:
        try:
            self._socket.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # gone, or it has left thousands of messages unread
            logger.warning("lost %s: %s", client[:64], error.strerror)
            self._clients.pop(client, None)
            self._abort([request_id for request_id, owner in self._request_id_to_client.items() if owner == client])

    def _broadcast(self, message: EngineMessage) -> None:
        for client in list(self._clients):
            self._send(client, message)


def refuse_clients(socket: zmq.Socket[bytes], reason: str, wait_ms: int) -> None:
    """Tells the first client that says hello why there is no engine core; waits so long for one."""
    while socket.poll(wait_ms):
        client, *frames = socket.recv_multipart()
        try:
            message = decode_client_message(frames[0]) if len(frames) == 1 else None
        except CodecError:
            continue
        if isinstance(message, Hello):
            socket.send_multipart([client, encode(StartFailed(reason))])
            return
