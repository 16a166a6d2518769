"""Channels over ZeroMQ, between nodes."""

from __future__ import annotations

import zmq

from llmstack_parallel.errors import LostRankError
from llmstack_parallel.messages import MAX_FRAME_BYTES

_HIGH_WATER_MARK = 1024
_LINGER_MS = 200
_RECONNECT_MS = 20


def set_limits(socket: zmq.Socket[bytes], high_water_mark: int = _HIGH_WATER_MARK) -> None:
    """Bounds what a pair of sockets holds, before it listens or connects."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)


class ZmqChannel:
    """One end of a pair of sockets; used by one thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """`socket`: Is of type PAIR, and listens or connects already."""
        self._socket = socket

    def send(self, frame: bytes) -> None:
        """Queues a frame.

        Raises:
            LostRankError: The other side has ended, or has left a thousand frames unread.
        """
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise LostRankError("it takes no message") from None

    def receive(self, timeout_ms: int | None = None) -> bytes | None:
        """The next frame; None if none comes in time."""
        if timeout_ms is not None and not self._socket.poll(timeout_ms):
            return None
        return self._socket.recv()

    def close(self) -> None:
        """Closes the socket; what was sent last has a moment to arrive."""
        self._socket.close()
