"""Check of a client's public key, by ZeroMQ's protocol for authentication (ZAP)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection
from typing import Any

import zmq
from zmq.utils import z85

_ADDRESS = "inproc://zeromq.zap.01"
_NUM_FRAMES = 7  # of a request with CURVE


def check_public_keys(context: zmq.Context[zmq.Socket[bytes]], accepted: Collection[bytes]) -> None:
    """Lets only clients with these public keys connect to the CURVE servers of a context, until its end.

    Without it, who knows a server's public key may connect with any keys.
    """
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(_ADDRESS)
    keys = {z85.decode(key) for key in accepted}
    threading.Thread(target=_answer, args=(socket, keys), name="key-check", daemon=True).start()


def _answer(socket: zmq.Socket[bytes], keys: Collection[bytes]) -> None:
    with contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):
        while True:
            request: list[Any] = socket.recv_multipart()
            is_known = len(request) == _NUM_FRAMES and request[5] == b"CURVE" and request[6] in keys
            status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            request_id = request[1] if len(request) > 1 else b""
            socket.send_multipart([b"1.0", request_id, *status, b"", b""])
    socket.close()
