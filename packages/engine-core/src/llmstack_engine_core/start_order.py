"""The start order, from the launcher to the process it starts.

It goes over the socket by which each of the two notices the end of the other.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmstack_engine_core.config import EngineConfig
from llmstack_engine_core.ipc.lifeline import receive_order, send_order
from llmstack_types import EngineStartError

# The byte by which a process in reserve says that its model is loaded.
LOADED: Final = b"\x01"


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
    send_order(
        lifeline,
        [order.config.to_plain(), str(order.directory), order.parent_pid, order.address, order.is_spare],
    )


def receive_start_order(lifeline: socket.socket) -> StartOrder:
    """Waits for the order.

    Raises:
        EngineStartError: It is malformed, or the sender has died.
    """
    match receive_order(lifeline):
        case [config, str(directory), int(parent_pid), str(address), bool(is_spare)]:
            return StartOrder(EngineConfig.from_plain(config), Path(directory), parent_pid, address, is_spare)
        case _:
            raise EngineStartError("the start order is malformed")
