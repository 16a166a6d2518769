"""Transfers between hosts: by NIXL, from places that an encrypted channel names."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import mmap
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from zlib import crc32

import zmq

from llmstack_engine_core.ipc.addresses import TCP, interface_address, tcp_address
from llmstack_engine_core.ipc.keys import Keys, read_keys
from llmstack_engine_core.ipc.sockets import use_keys
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferNetwork
from llmstack_engine_core.kv_transfer.export_server import ExportServer
from llmstack_engine_core.kv_transfer.exports import ExportTable
from llmstack_engine_core.kv_transfer.messages import MAX_MESSAGE_BYTES, Ask, Done, Place, Refused, pack, unpack
from llmstack_engine_core.kv_transfer.nixl_agent import NixlAgent
from llmstack_engine_core.kv_transfer.tag import KVTransferError, difference

_HANDLE_LENGTH: Final = 32
_NO_EXPORT: Final = "the parameters name no export of this cluster"
_CANNOT_BE_READ: Final = "the other engine core gave no answer that can be read"


class NixlTransfer:
    """Implements `KVTransfer`. `import_blocks` may be called in any thread, everything else in one.

    An engine core is named by a random number and its address. A handle carries a code that only who has the cluster's
    keys can make, so that no client can name an address to connect to.
    """

    def __init__(
        self, config: KVTransferConfig, network: TransferNetwork, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Reads the keys, starts NIXL and listens.

        Raises:
            EngineStartError: One of these is not possible.
        """
        self._limits, self._clock = config.kv_connector_extra_config, clock
        self._interface = network.interface
        self._name = self.engine_id = secrets.token_hex(16)
        self._keys: Keys = read_keys(Path(network.key_file))
        self._table = ExportTable(self._limits, clock)
        self._server: ExportServer | None = None
        self._reader: NixlAgent | None = None
        self._reading = threading.Lock()
        host = interface_address(network.interface)
        if config.can_import:
            self._reader = self._new_agent()
        if config.can_export:
            address = tcp_address(host, self._limits.side_channel_port)
            self._server = ExportServer(self._table, self._keys, address, self._new_agent, self._limits)
            self.engine_id = f"{self._name}@{self._server.address.removeprefix(TCP)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def export_blocks(self, tag: bytes, num_bytes: int, fill: Callable[[memoryview], None]) -> str | None:
        """As `KVTransfer.export_blocks`; `fill` must not keep the memory."""
        if self._server is None:
            return None
        handle = self._table.fill(tag, num_bytes, fill)
        if handle is None:
            return None
        self._server.wake()  # it waits for what expires next
        return handle + _code(self._keys.secret, self.engine_id, handle)

    def import_blocks(self, engine_id: str, transfer_id: str, tag: bytes, num_bytes: int) -> memoryview:
        """The bytes of an export, as `KVTransfer.import_blocks` says."""
        if num_bytes > self._limits.max_bytes:
            raise KVTransferError(f"{num_bytes} bytes exceed max_bytes {self._limits.max_bytes}")
        deadline_s = time.monotonic() + self._limits.import_timeout_s
        address, handle = self._checked_names(engine_id, transfer_id)
        if not self._reading.acquire(timeout=self._limits.import_timeout_s):
            raise KVTransferError("another import takes all the time")
        try:
            with self._channel(address) as channel:
                channel.send(pack(Ask(handle, tag, num_bytes)))
                place = _answer(channel, deadline_s, tag)
                memory = mmap.mmap(-1, num_bytes)
                self._read(place, memory, deadline_s)
                channel.send(pack(Done()))
        finally:
            self._reading.release()
        if crc32(memory) != place.checksum:
            raise KVTransferError("the bytes of the export are damaged")
        return memoryview(memory)

    def num_exports(self) -> int:
        """Exports that are kept now."""
        return len(self._table)

    def close(self) -> None:
        """Drops all exports and ends the thread. Idempotent."""
        if self._server is not None:
            self._server.close()
        self._table.clear()
        if self._reading.acquire(timeout=self._limits.import_timeout_s):
            self._reader = None
            self._reading.release()
            self._context.term()

    def _checked_names(self, engine_id: str, transfer_id: str) -> tuple[str, str]:
        """The address of the export, and its handle there."""
        handle, code = transfer_id[:_HANDLE_LENGTH], transfer_id[_HANDLE_LENGTH:]
        known = [_code(secret, engine_id, handle) for _, secret in self._keys.pairs]
        if not any(hmac.compare_digest(one.encode(), code.encode("utf-8", "replace")) for one in known):
            raise KVTransferError(_NO_EXPORT)
        return TCP + engine_id.partition("@")[2], handle

    @contextlib.contextmanager
    def _channel(self, address: str) -> Iterator[zmq.Socket[bytes]]:
        channel = self._context.socket(zmq.DEALER)
        try:
            use_keys(channel, self._keys)
            channel.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            channel.setsockopt(zmq.LINGER, 1000)  # the last message frees the export
            channel.setsockopt(zmq.IPV6, int("[" in address))
            channel.connect(address)
            yield channel
        except zmq.ZMQError as error:
            raise KVTransferError(f"the other engine core cannot be reached: {error.strerror}") from error
        finally:
            channel.close()

    def _read(self, place: Place, memory: mmap.mmap, deadline_s: float) -> None:
        if self._reader is None or self._reader.is_worn:
            self._reader = self._new_agent()
        try:
            self._reader.read(place.metadata, place.address, memory, deadline_s, time.monotonic)
        except BaseException:
            # What is under way could still be written, but only while the agent exists.
            self._reader = None
            raise

    def _new_agent(self) -> NixlAgent:
        return NixlAgent(f"{self._name}-{secrets.token_hex(4)}", self._interface)


def _answer(channel: zmq.Socket[bytes], deadline_s: float, tag: bytes) -> Place:
    """The place of the export, which must be the requested one."""
    wait_ms = max(0, int((deadline_s - time.monotonic()) * 1000))
    if not channel.poll(wait_ms):
        raise KVTransferError("the other engine core does not answer")
    answer = unpack(channel.recv())
    if isinstance(answer, Refused):
        raise KVTransferError(answer.reason)
    if not isinstance(answer, Place):
        raise KVTransferError(_CANNOT_BE_READ)
    differs = difference(answer.tag, tag)
    if differs is not None:
        raise KVTransferError(f"the export differs in {differs or 'its owner'}")
    return answer


def _code(secret: bytes, engine_id: str, handle: str) -> str:
    text = f"{engine_id} {handle}".encode("utf-8", "replace")
    return hmac.new(secret, text, hashlib.sha256).hexdigest()[:32]
