"""Sockets between nodes: each has keys, and each listener one named address."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final

import zmq

from llmstack_engine_core.ipc.addresses import check_address, interface_address, own_host, tcp_address
from llmstack_engine_core.ipc.key_check import check_public_keys
from llmstack_engine_core.ipc.keys import Keys, read_keys
from llmstack_engine_core.ipc.sockets import use_keys
from llmstack_parallel.channel import set_limits
from llmstack_types import EngineStartError, RankPlacement

_FAILED: Final = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_EVENT: Final = struct.Struct("=HI")


class FailedHandshakes:
    """Notes connections of one socket that fail because the other side has different keys.

    Attributes:
        events: Becomes readable with the next one.
    """

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self._watched = watched
        self.events: zmq.Socket[bytes] = watched.get_monitor_socket(_FAILED)

    def take(self) -> int:
        """How many there were since the last call; does not wait."""
        num_failures = 0
        while self.events.poll(0):
            frames = self.events.recv_multipart()
            num_failures += bool(_EVENT.unpack_from(frames[0])[0] & _FAILED)
        return num_failures

    def close(self) -> None:
        """Ends the notes; the socket itself stays open."""
        self._watched.disable_monitor()
        self.events.close(0)


class Network:
    """The sockets of one process; their keys are those of the cluster's file."""

    def __init__(self, placement: RankPlacement) -> None:
        """Reads the keys.

        Raises:
            EngineStartError: The key file cannot be used.
        """
        self.keys: Keys = read_keys(Path(placement.key_file))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        check_public_keys(self.context, self.keys.accepted)
        self._sockets: list[zmq.Socket[bytes]] = []

    def listen(self, socket_type: int, address: str, high_water_mark: int = 1000) -> tuple[zmq.Socket[bytes], str]:
        """A socket that listens, and its address; port 0 stands for a free one.

        Raises:
            EngineStartError: It cannot be listened on.
        """
        bound = self._socket(socket_type, high_water_mark)
        bound.setsockopt(zmq.ZAP_DOMAIN, b"llmstack")
        bound.setsockopt(zmq.CURVE_SERVER, 1)
        bound.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret)
        host, _, port = address.rpartition(":")
        try:
            check_address(f"{host}:1", is_remote=True)
            bound.bind(f"{host}:*" if port == "0" else address)
            return bound, bound.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise EngineStartError(f"{address} cannot be listened on: {error.strerror}") from error

    def connect(self, socket_type: int, address: str, high_water_mark: int = 1000) -> zmq.Socket[bytes]:
        """A socket that connects, also before the other side listens."""
        connected = self._socket(socket_type, high_water_mark)
        use_keys(connected, self.keys)
        connected.connect(address)
        return connected

    def _socket(self, socket_type: int, high_water_mark: int) -> zmq.Socket[bytes]:
        made = self.context.socket(socket_type)
        set_limits(made, high_water_mark)
        self._sockets.append(made)
        return made

    def close(self) -> None:
        """Closes all sockets; what was sent last has a moment to arrive. Idempotent."""
        for made in self._sockets:
            made.close()
        self._sockets = []
        self.context.term()


def listening_address(placement: RankPlacement) -> str:
    """The address of node 0: the given one, or a free port of the network interface.

    Raises:
        EngineStartError: The interface has no address.
    """
    return placement.address or tcp_address(interface_address(placement.interface), 0)


def free_address(other: str) -> str:
    """A free port of the address by which another node sees this one.

    Raises:
        EngineStartError: There is no way to it.
    """
    host = other.removeprefix("tcp://").rpartition(":")[0].removeprefix("[").removesuffix("]")
    return tcp_address(own_host(host), 0)
