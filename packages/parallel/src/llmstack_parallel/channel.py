"""Channels over ZeroMQ, on sockets in a private directory."""

from __future__ import annotations

import zmq

from llmstack_parallel.messages import MAX_FRAME_BYTES

_HIGH_WATER_MARK = 1024
_LINGER_MS = 200
_RECONNECT_MS = 20


class ZmqChannel:
    """One end of a pair of sockets; used by one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, *, binds: bool) -> None:
        """Listens on the address, or connects to it, also before the other side listens.

        Raises:
            zmq.ZMQError: It cannot be listened on.
        """
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if binds:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def send(self, frame: bytes) -> None:
        """Queues a frame.

        Raises:
            zmq.Again: The other side has left a thousand frames unread.
        """
        self._socket.send(frame, zmq.NOBLOCK)

    def receive(self, timeout_ms: int | None = None) -> bytes | None:
        """The next frame; None if none comes in time."""
        if timeout_ms is not None and not self._socket.poll(timeout_ms):
            return None
        return self._socket.recv()

    def close(self) -> None:
        """Closes the socket; what was sent last has a moment to arrive."""
        self._socket.close()
