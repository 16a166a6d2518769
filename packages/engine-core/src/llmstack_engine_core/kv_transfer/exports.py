"""The exports of one engine core, bounded in number, bytes and time."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from llmstack_engine_core.kv_transfer import sealed_memory
from llmstack_engine_core.kv_transfer.config import TransferLimits
from llmstack_engine_core.kv_transfer.tag import KVTransferError, difference

logger = logging.getLogger(__name__)

_UNKNOWN = "there is no such export, or it has expired or been fetched"


class Export(NamedTuple):
    """Bytes in memory without a name, which the owner of the descriptor closes."""

    descriptor: int
    tag: bytes
    num_bytes: int
    expires_s: float


class Alarm:
    """Wakes a thread that waits for sockets, which waits for this one too: `fileno`."""

    def __init__(self) -> None:
        self._given, self._waited_for = socket.socketpair()
        self._given.setblocking(False)

    def ring(self) -> None:
        """Wakes the thread. May be called by any other."""
        with contextlib.suppress(OSError):  # full: it is about to look
            self._given.send(b"w")

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._waited_for.fileno()

    def stop(self) -> None:
        """Lets the thread wait again; it has been woken."""
        self._waited_for.recv(4096)

    def close(self) -> None:
        """Closes both ends; afterwards nothing is woken."""
        self._given.close()
        self._waited_for.close()


class ExportTable:
    """Exports by handle; used by several threads. Each can be taken once."""

    def __init__(self, limits: TransferLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._exports: dict[str, Export] = {}  # the first one expires first
        self._num_bytes = 0

    def reserve(self, num_bytes: int) -> bool:
        """Counts bytes that `add` will hold, or `cancel` frees; False if they would exceed the limits."""
        self.expire()
        with self._lock:
            is_full = len(self._exports) >= self._limits.max_exports
            if is_full or self._num_bytes + num_bytes > self._limits.max_bytes:
                return False
            self._num_bytes += num_bytes
            return True

    def cancel(self, num_bytes: int) -> None:
        """Frees what was reserved."""
        with self._lock:
            self._num_bytes -= num_bytes

    def add(self, descriptor: int, tag: bytes, num_bytes: int) -> str:
        """Keeps reserved bytes; the handle, of 128 random bits."""
        handle = secrets.token_hex(16)
        with self._lock:
            expires_s = self._clock() + self._limits.time_to_live_s
            self._exports[handle] = Export(descriptor, tag, num_bytes, expires_s)
        return handle

    def fill(self, tag: bytes, num_bytes: int, fill: Callable[[memoryview], None]) -> str | None:
        """Keeps bytes that `fill` writes; the handle, None if they would exceed the limits."""
        if not num_bytes or not self.reserve(num_bytes):
            return None
        try:
            descriptor = sealed_memory.filled(num_bytes, fill)
        except OSError as error:
            logger.warning("KV blocks of %d bytes could not be exported: %s", num_bytes, error.strerror)
            self.cancel(num_bytes)
            return None
        except BaseException:
            self.cancel(num_bytes)
            raise
        return self.add(descriptor, tag, num_bytes)

    def take(self, handle: str, tag: bytes, num_bytes: int) -> Export:
        """Takes the export, which is kept no longer; one with another tag stays.

        Raises:
            KVTransferError: There is none, or it is another one.
        """
        self.expire()
        with self._lock:
            export = self._exports.get(handle)
            differs = "" if export is None else difference(export.tag, tag)
            if export is None or differs == "":
                raise KVTransferError(_UNKNOWN)
            if differs is not None or export.num_bytes != num_bytes:
                raise KVTransferError(f"the export differs in {differs or 'size'}")
            del self._exports[handle]
            self._num_bytes -= export.num_bytes
            return export

    def expire(self) -> float | None:
        """Drops what has expired; seconds until the next one expires, None without any."""
        with self._lock:
            now_s = self._clock()
            for handle, export in list(self._exports.items()):
                if export.expires_s > now_s:
                    return export.expires_s - now_s
                self._drop(handle)
        return None

    def clear(self) -> None:
        """Drops all exports, and closes their memory."""
        with self._lock:
            for handle in list(self._exports):
                self._drop(handle)

    def __len__(self) -> int:
        self.expire()
        return len(self._exports)

    def _drop(self, handle: str) -> None:
        export = self._exports.pop(handle)
        self._num_bytes -= export.num_bytes
        os.close(export.descriptor)
