"""Transfers between engine cores of one host, over memory without a name.

An export lies in a memfd, which is sealed and goes to the importer as a descriptor over a unix socket. The socket is an
abstract one, named after the engine core: like the memory, it ends with the process, however that ends. Both sides
check that the other one runs as the same user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from llmstack_engine_core.kv_transfer import sealed_memory
from llmstack_engine_core.kv_transfer.config import KVTransferConfig
from llmstack_engine_core.kv_transfer.exports import Alarm, Export, ExportTable
from llmstack_engine_core.kv_transfer.messages import MAX_MESSAGE_BYTES, Ask, Handed, Message, Refused, pack, unpack
from llmstack_engine_core.kv_transfer.tag import KVTransferError

logger = logging.getLogger(__name__)

_NAME_PREFIX: Final = "\0llmstack-kv-"
_SERVE_TIMEOUT_S: Final = 2.0
_BACKLOG: Final = 64
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class SharedMemoryTransfer:
    """Implements `KVTransfer`. `import_blocks` may be called in any thread, everything else in one."""

    def __init__(self, config: KVTransferConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine_id = secrets.token_hex(16)
        self._limits = config.kv_connector_extra_config
        self._table = ExportTable(self._limits, clock)
        self._is_closed = False
        self._server: _Server | None = _Server(self.engine_id, self._table) if config.can_export else None

    def export_blocks(self, tag: bytes, num_bytes: int, fill: Callable[[memoryview], None]) -> str | None:
        """As `KVTransfer.export_blocks`; `fill` must not keep the memory."""
        if self._server is None:
            return None
        handle = self._table.fill(tag, num_bytes, fill)
        if handle is None:
            return None
        self._server.wake()  # it waits for what expires next
        return handle

    def import_blocks(self, engine_id: str, transfer_id: str, tag: bytes, num_bytes: int) -> memoryview:
        """The bytes of an export, as `KVTransfer.import_blocks` says."""
        if num_bytes > self._limits.max_bytes:
            raise KVTransferError(f"{num_bytes} bytes exceed max_bytes {self._limits.max_bytes}")
        deadline_s = time.monotonic() + self._limits.import_timeout_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(self._limits.import_timeout_s)
                peer.connect(_NAME_PREFIX + engine_id)
                _check_user(peer)
                _send(peer, Ask(transfer_id, tag, num_bytes))
                answer = _receive(peer, deadline_s)
                if isinstance(answer, Refused):
                    raise KVTransferError(answer.reason)
                if not isinstance(answer, Handed):
                    raise KVTransferError("the other engine core gave no answer that can be read")
                _, descriptors, _, _ = socket.recv_fds(peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except (OSError, UnicodeError) as error:
            raise KVTransferError(f"the other engine core cannot be reached: {error}") from error
        if not descriptors:
            raise KVTransferError("the export came without its memory")
        return sealed_memory.checked(descriptors[0], num_bytes, answer.checksum)

    def num_exports(self) -> int:
        """Exports that are kept now."""
        return len(self._table)

    def close(self) -> None:
        """Drops all exports and ends the thread. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if self._server is not None:
                self._server.close()
            self._table.clear()


class _Server:
    """A thread that hands exports out, and drops those that have expired."""

    def __init__(self, engine_id: str, table: ExportTable) -> None:
        self._table = table
        self._is_closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(_NAME_PREFIX + engine_id)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._alarm = Alarm()
        self.wake = self._alarm.ring  # lets the thread look again at what expires
        self._thread = threading.Thread(target=self._run, name="export-kv", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, and closes its sockets."""
        self._is_closing = True
        self.wake()
        self._thread.join(2 * _SERVE_TIMEOUT_S)
        self._listener.close()
        self._alarm.close()

    def _run(self) -> None:
        while not self._is_closing:
            sockets: list[Alarm | socket.socket] = [self._listener, self._alarm]
            readable, _, _ = select.select(sockets, [], [], self._table.expire())
            if self._alarm in readable:
                self._alarm.stop()
            if self._listener in readable:
                try:
                    self._serve(self._listener.accept()[0])
                except Exception:  # whatever a peer does, the next one is served
                    logger.exception("an export could not be handed out")

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            peer.settimeout(_SERVE_TIMEOUT_S)
            try:
                _check_user(peer)
                export = self._asked_for(_receive(peer, time.monotonic() + _SERVE_TIMEOUT_S))
            except KVTransferError as error:
                with contextlib.suppress(OSError):
                    _send(peer, Refused(str(error)))
                return
            except OSError as error:
                logger.warning("a request for KV blocks was cut off: %s", error)
                return
            with contextlib.suppress(OSError):  # the other side has gone, and computes the prompt
                _send(peer, Handed(sealed_memory.checksum_of(export.descriptor, export.num_bytes)))
                socket.send_fds(peer, [b"m"], [export.descriptor])
            os.close(export.descriptor)

    def _asked_for(self, request: Message) -> Export:
        if not isinstance(request, Ask):
            raise KVTransferError("the request for KV blocks cannot be read")
        return self._table.take(request.handle, request.tag, request.num_bytes)


def _check_user(peer: socket.socket) -> None:
    packed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(packed)[1] != os.geteuid():
        raise KVTransferError("the other process belongs to another user")


def _send(peer: socket.socket, message: Message) -> None:
    packed = pack(message)
    peer.sendall(_LENGTH.pack(len(packed)) + packed)


def _receive(peer: socket.socket, deadline_s: float) -> Message:
    (length,) = _LENGTH.unpack(_read(peer, _LENGTH.size, deadline_s))
    if length > MAX_MESSAGE_BYTES:
        raise KVTransferError(f"a message of {length} bytes is too large")
    return unpack(_read(peer, length, deadline_s))


def _read(peer: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Reads so many bytes; each wait is as long as the time that is left."""
    received = bytearray()
    while len(received) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time is over")
        peer.settimeout(left_s)
        piece = peer.recv(min(num_bytes - len(received), 1 << 20))
        if not piece:
            raise KVTransferError("the other side has closed the connection")
        received += piece
    return bytes(received)
