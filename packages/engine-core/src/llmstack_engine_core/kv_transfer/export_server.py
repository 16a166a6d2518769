"""Server of the places of exports, which stay while other engine cores read them."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import zmq

from llmstack_engine_core.ipc.keys import Keys
from llmstack_engine_core.ipc.sockets import serve_keys
from llmstack_engine_core.kv_transfer import sealed_memory
from llmstack_engine_core.kv_transfer.config import TransferLimits
from llmstack_engine_core.kv_transfer.exports import Alarm, Export, ExportTable
from llmstack_engine_core.kv_transfer.messages import (
    MAX_MESSAGE_BYTES,
    Ask,
    Done,
    Message,
    Place,
    Refused,
    pack,
    unpack,
)
from llmstack_engine_core.kv_transfer.nixl_agent import NixlAgent, Registration
from llmstack_engine_core.kv_transfer.tag import KVTransferError
from llmstack_types import EngineStartError

logger = logging.getLogger(__name__)

_POLL_MS: Final = 1
_MAX_LATE: Final = 16
_CLOSE_TIMEOUT_S: Final = 10.0


class _Reading(NamedTuple):
    """An export that another engine core reads now."""

    registration: Registration
    memory: mmap.mmap
    deadline_s: float


class ExportServer:
    """A thread, which sleeps while no export is read.

    Attributes:
        address: Where it listens.
    """

    def __init__(
        self,
        table: ExportTable,
        keys: Keys,
        address: str,
        new_agent: Callable[[], NixlAgent],
        limits: TransferLimits,
    ) -> None:
        """Listens; port 0 stands for a free one.

        Raises:
            EngineStartError: It cannot be listened on, or NIXL cannot be used.
        """
        self._table, self._new_agent, self._limits = table, new_agent, limits
        self._agent = new_agent()
        self._readings: dict[bytes, _Reading] = {}  # the first one is late first
        self._late: list[_Reading] = []
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._listening(keys, address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._alarm = Alarm()
        self.wake = self._alarm.ring  # lets the thread look again at what expires
        self._thread = threading.Thread(target=self._run, name="export-kv", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and closes its sockets. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self.wake()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _listening(self, keys: Keys, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.ROUTER)
        serve_keys(self._context, made, keys)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, int("[" in address))
        try:
            made.bind(f"{address.removesuffix(':0')}:*" if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            made.close()
            self._context.term()
            raise EngineStartError(f"{address} cannot be listened on: {error.strerror}") from error
        return made

    def _run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._alarm, zmq.POLLIN)
            while not self._is_closing:
                ready = dict(poller.poll(self._wait_ms()))
                if self._alarm.fileno() in ready:
                    self._alarm.stop()
                if self._socket in ready:
                    self._serve(self._socket.recv_multipart())
                self._progress()
        finally:
            self._end()

    def _wait_ms(self) -> int | None:
        if self._readings:
            return _POLL_MS
        left_s = self._table.expire()
        return None if left_s is None else int(left_s * 1000) + 1

    def _progress(self) -> None:
        if not self._readings:
            return
        try:
            self._agent.progress()
        except Exception:  # a peer that has gone
            logger.exception("NIXL: an export could not be handed out")
        peer, first = next(iter(self._readings.items()))
        if first.deadline_s <= time.monotonic():
            logger.warning("KV blocks were not read within %g s", self._limits.import_timeout_s)
            self._late.append(self._readings.pop(peer))
        if len(self._late) > (0 if not self._readings else _MAX_LATE):
            # All connections end with the agent: no peer can then ask for memory that is freed.
            self._drop_readings()
            self._agent = self._new_agent()

    def _serve(self, frames: list[bytes]) -> None:
        answer: Message
        try:
            peer, frame = frames
            request = unpack(frame)
            if isinstance(request, Done):
                self._done(peer)
                return
            answer = self._opened(peer, request)
        except (KVTransferError, ValueError) as error:
            answer = Refused(str(error))
        except Exception as error:  # whatever a peer does, the next one is served
            logger.exception("an export could not be handed out")
            answer = Refused(type(error).__name__)
        with contextlib.suppress(zmq.ZMQError):  # it has gone
            self._socket.send_multipart([frames[0], pack(answer)], zmq.NOBLOCK)

    def _opened(self, peer: bytes, request: Message) -> Place:
        if not isinstance(request, Ask):
            raise KVTransferError("the request for KV blocks cannot be read")
        if peer in self._readings:
            raise KVTransferError("one connection reads one export")
        export = self._table.take(request.handle, request.tag, request.num_bytes)
        try:
            return Place(*self._registered(peer, export), export.tag)
        finally:
            os.close(export.descriptor)

    def _registered(self, peer: bytes, export: Export) -> tuple[bytes, int, int]:
        checksum = sealed_memory.checksum_of(export.descriptor, export.num_bytes)
        # Private: a sealed file cannot be mapped for writing, and a registration needs that.
        memory = mmap.mmap(export.descriptor, export.num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        registration = self._agent.register(memory)
        deadline_s = time.monotonic() + self._limits.import_timeout_s
        self._readings[peer] = _Reading(registration, memory, deadline_s)
        return self._agent.metadata(), registration.address, checksum

    def _done(self, peer: bytes) -> None:
        reading = self._readings.pop(peer, None)
        if reading is not None:
            reading.registration.close()
            reading.memory.close()

    def _drop_readings(self) -> None:
        readings = [*self._readings.values(), *self._late]
        self._readings, self._late = {}, []
        for reading in readings:
            reading.registration.close()
        del self._agent
        for reading in readings:
            reading.memory.close()

    def _end(self) -> None:
        self._is_closing = True
        self._socket.close()
        self._context.term()
        self._drop_readings()
        self._alarm.close()
