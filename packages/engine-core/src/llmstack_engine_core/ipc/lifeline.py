"""Orders over the socket by which two processes notice each other's end."""

from __future__ import annotations

import contextlib
import socket
import struct

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_types import EngineStartError

MAX_ORDER_BYTES = 2**20
_LENGTH = struct.Struct("!I")


def send_order(lifeline: socket.socket, values: list[object]) -> None:
    """Sends an order of plain values; a receiver that has died already is not an error here."""
    body = msgpack.packb(values)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        lifeline.sendall(_LENGTH.pack(len(body)) + body)


def receive_order(lifeline: socket.socket) -> object:
    """Waits for the values of an order, whose types the caller checks.

    Raises:
        EngineStartError: It is too large, or the sender has ended.
    """
    (num_bytes,) = _LENGTH.unpack(_receive_exactly(lifeline, _LENGTH.size))
    if num_bytes > MAX_ORDER_BYTES:
        raise EngineStartError(f"the start order has {num_bytes} bytes; {MAX_ORDER_BYTES} is the limit")
    values: object = msgpack.unpackb(_receive_exactly(lifeline, num_bytes))
    return values


def _receive_exactly(lifeline: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        chunk = lifeline.recv(num_bytes - len(received))
        if not chunk:
            raise EngineStartError("the launcher ended before it had sent the start order")
        received += chunk
    return bytes(received)
