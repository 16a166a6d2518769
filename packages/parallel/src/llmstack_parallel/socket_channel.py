"""Channels over a pair of sockets, between processes of one machine."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from typing import Final

from llmstack_parallel.errors import LostRankError
from llmstack_parallel.messages import MAX_FRAME_BYTES

_LENGTH: Final = struct.Struct("=Q")
_READ_BYTES: Final = 65_536
MAX_WAITING_FRAMES: Final = 1024


class SocketChannel:
    """One end; used by one thread.

    A frame passes from the one thread to the other in the kernel, with one wake-up. ZeroMQ has a thread at either end,
    which is two wake-ups more and time of a core that ranks compute on. Bytes that the kernel does not take at once are
    written by a thread that lives as long as there is something left.
    """

    def __init__(self, end: socket.socket) -> None:
        """`end`: Of a stream; it blocks."""
        self._socket = end
        self._poller = select.poll()
        self._poller.register(end, select.POLLIN)
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._is_behind = False
        self._lock = threading.Lock()

    def send(self, frame: bytes) -> None:
        """Sends a frame, or queues it.

        Raises:
            LostRankError: The other side has ended, or has left a thousand frames unread.
        """
        length = _LENGTH.pack(len(frame))
        with self._lock:
            num_sent = 0
            if not self._is_behind:
                try:
                    num_sent = self._socket.sendmsg([length, frame], (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise LostRankError(f"it has closed its channel: {error.strerror}") from None
                if num_sent == _LENGTH.size + len(frame):
                    return
            if len(self._unsent) >= MAX_WAITING_FRAMES:
                raise LostRankError("it takes no message")
            self._unsent.append(memoryview(length + frame)[num_sent:])
            if not self._is_behind:
                self._is_behind = True
                threading.Thread(target=self._write, name="unsent-frames", daemon=True).start()

    def receive(self, timeout_ms: int | None = None) -> bytes | None:
        """The next frame; None if none comes in time.

        Raises:
            LostRankError: The other side has ended, or sends no frames.
        """
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            if timeout_ms is not None and not self._poller.poll(timeout_ms):
                return None
            try:
                data = self._socket.recv(max(_READ_BYTES, self._num_missing()))
            except OSError as error:
                raise LostRankError(f"its channel is broken: {error.strerror}") from error
            if not data:
                raise LostRankError("it has closed its channel")
            if not self._received and len(data) == _LENGTH.size + _length(data):
                return data[_LENGTH.size :]  # as nearly always
            self._received += data

    def close(self) -> None:
        """Closes the socket. Bytes that were sent can still be read."""
        with self._lock:
            self._unsent.clear()
        self._socket.close()

    def _num_missing(self) -> int:
        """Bytes that are known to come."""
        if len(self._received) < _LENGTH.size:
            return 0
        return min(_length(self._received) + _LENGTH.size - len(self._received), 16 * _READ_BYTES)

    def _take(self) -> bytes | None:
        """The next frame of what has been received."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _length(self._received) + _LENGTH.size
        if end > MAX_FRAME_BYTES + _LENGTH.size:
            raise LostRankError(f"it sends a frame of {end} bytes; {MAX_FRAME_BYTES} is the limit")
        if len(self._received) < end:
            return None
        frame = bytes(memoryview(self._received)[_LENGTH.size : end])
        del self._received[:end]
        return frame

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    self._is_behind = False
                    return
                data = self._unsent[0]
            try:
                self._socket.sendall(data)
            except OSError:  # it has ended; what watches ranks says so
                return
            with self._lock:
                if self._unsent:
                    self._unsent.popleft()


def _length(data: bytes | bytearray) -> int:
    if len(data) < _LENGTH.size:
        return -1
    length: int = _LENGTH.unpack_from(data)[0]
    return length
