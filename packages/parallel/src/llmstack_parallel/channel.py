"""Channels over ZeroMQ, between nodes."""

from __future__ import annotations

import zmq

from llmstack_parallel.errors import LostRankError


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
