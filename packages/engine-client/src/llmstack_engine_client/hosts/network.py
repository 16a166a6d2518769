"""Sockets between machines: each has keys, and each listener one named address."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import zmq

from llmstack_engine_core.ipc.addresses import check_address, own_host, tcp_address
from llmstack_engine_core.ipc.key_check import check_public_keys
from llmstack_engine_core.ipc.keys import read_keys
from llmstack_engine_core.ipc.sockets import RECONNECT_MS, set_heartbeats, use_keys
from llmstack_types import EngineStartError

LINGER_MS: Final = 200
FAILED_HANDSHAKES: Final = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT: Final = struct.Struct("=HI")


@dataclass(frozen=True, slots=True)
class FirstMachine:
    """The address and keys of the machine where others join.

    Attributes:
        address: Where the first one listens, as `tcp://IP:port`; port 0 stands for a free one.
        key_file: Path of the keys that all machines share.
        timeout_s: A machine without a sign of life for so long counts as lost.
        name: The first one, for messages.
    """

    address: str
    key_file: str | None
    timeout_s: float
    name: str = "the first machine"


class Network:
    """The sockets of one process to those of other machines. Their keys are those of the cluster's file."""

    def __init__(self, key_file: str | None, max_message_bytes: int, context: zmq.Context[Any] | None = None) -> None:
        """Reads the keys. `context`: Of an event loop's sockets, which can connect alone.

        Raises:
            EngineStartError: The key file cannot be used, or there is none.
        """
        if key_file is None:
            raise EngineStartError("a connection between machines needs --cluster-key-file")
        self.keys = read_keys(Path(key_file))
        self._max_message_bytes = max_message_bytes
        self._context: zmq.Context[Any] = zmq.Context() if context is None else context
        if context is None:
            check_public_keys(self._context, self.keys.accepted)
        self._sockets: list[zmq.Socket[Any]] = []

    def listen(
        self, socket_type: int, address: str, timeout_s: float = 0.0, high_water_mark: int = 1000
    ) -> tuple[zmq.Socket[Any], str]:
        """A socket that listens, and its address; port 0 stands for a free one.

        `timeout_s`: A connection without a sign of life for so long is closed; 0 asks for none.

        Raises:
            EngineStartError: It cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        check_address(f"{host}:1" if port == "0" else address, is_remote=True)
        bound = self._socket(socket_type, timeout_s, high_water_mark)
        bound.setsockopt(zmq.ZAP_DOMAIN, b"llmstack")
        bound.setsockopt(zmq.CURVE_SERVER, 1)
        bound.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        try:
            bound.bind(f"{host}:*" if port == "0" else address)
            return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise EngineStartError(f"{address} cannot be listened on: {error.strerror}") from error

    def connect(
        self,
        socket_type: int,
        address: str,
        timeout_s: float = 0.0,
        high_water_mark: int = 1000,
        server_key: bytes | None = None,
    ) -> zmq.Socket[Any]:
        """A socket that connects, also before the other side listens.

        `timeout_s`: As for `listen`; `server_key`: The other side's, where it is not the one in use here.
        """
        connected = self._socket(socket_type, timeout_s, high_water_mark)
        use_keys(connected, self.keys, server_key)
        connected.connect(address)
        return connected

    def _socket(self, socket_type: int, timeout_s: float, high_water_mark: int) -> zmq.Socket[Any]:
        made: zmq.Socket[object] = self._context.socket(socket_type)
        for option, value in (
            (zmq.MAXMSGSIZE, self._max_message_bytes),
            (zmq.SNDHWM, high_water_mark),
            (zmq.RCVHWM, high_water_mark),
            (zmq.LINGER, LINGER_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
        ):
            made.setsockopt(option, value)
        set_heartbeats(made, timeout_s)
        self._sockets = [*(one for one in self._sockets if not one.closed), made]
        return made

    def close(self) -> None:
        """Closes all sockets; what was sent last has a moment to arrive. Idempotent."""
        for made in self._sockets:
            made.close()
        self._context.term()


def is_failed_handshake(frames: Sequence[bytes]) -> bool:
    """Whether an event of a socket's monitor is a connection that fails, as it does where the keys differ."""
    return bool(_EVENT.unpack_from(frames[0])[0] & FAILED_HANDSHAKES)


def free_address(other: str) -> str:
    """A free port of the address by which another machine sees this one.

    Raises:
        EngineStartError: There is no way to it.
    """
    host = other.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")
    return tcp_address(own_host(host), 0)
