"""The start order, from the launcher to the process it starts.

It goes over the socket by which each of the two notices the end of the other.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

import msgpack  # type: ignore[import-untyped]  # it ships no types

from llmstack_engine_core.config import EngineConfig
from llmstack_types import EngineStartError

MAX_ORDER_BYTES = 2**20
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class StartOrder:
    """One engine core to start.

    Attributes:
        directory: A private one of its own; removed at its end.
        parent_pid: The process to end with.
        address: Where it listens.
        is_spare: It loads its model and waits for a second order; directory and address are only in that.
    """

    config: EngineConfig
    directory: Path
    parent_pid: int
    address: str
    is_spare: bool = False


def send_start_order(lifeline: socket.socket, order: StartOrder) -> None:
    """Sends the order; a receiver that has died already is not an error here."""
    body = msgpack.packb(
        [order.config.to_plain(), str(order.directory), order.parent_pid, order.address, order.is_spare]
    )
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        lifeline.sendall(_LENGTH.pack(len(body)) + body)


def receive_start_order(lifeline: socket.socket) -> StartOrder:
    """Waits for the order.

    Raises:
        EngineStartError: It is malformed, or the sender has died.
    """
    (num_bytes,) = _LENGTH.unpack(_receive_exactly(lifeline, _LENGTH.size))
    if num_bytes > MAX_ORDER_BYTES:
        raise EngineStartError(f"the start order has {num_bytes} bytes; {MAX_ORDER_BYTES} is the limit")
    match msgpack.unpackb(_receive_exactly(lifeline, num_bytes)):
        case [config, str(directory), int(parent_pid), str(address), bool(is_spare)]:
            return StartOrder(EngineConfig.from_plain(config), Path(directory), parent_pid, address, is_spare)
        case _:
            raise EngineStartError("the start order is malformed")


def _receive_exactly(lifeline: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        chunk = lifeline.recv(num_bytes - len(received))
        if not chunk:
            raise EngineStartError("the launcher ended before it had sent the start order")
        received += chunk
    return bytes(received)
