"""Addresses of engine cores.

`ipc://` paths in private directories, or TCP ports of the loopback interface.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path
from typing import Final

from llmstack_engine_core.ipc.sockets import MAX_SOCKET_PATH_BYTES, check_private_directory
from llmstack_types import EngineStartError

IPC: Final = "ipc://"
TCP: Final = "tcp://"
_PROBE_TIMEOUT_S: Final = 1.0


def check_address(address: str) -> None:
    """Refuses an address that is malformed or that other machines can reach.

    Raises:
        EngineStartError: Names the address and what is wrong with it.
    """
    if address.startswith(IPC):
        path = address.removeprefix(IPC)
        if not path.startswith("/") or not 1 < len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            raise EngineStartError(
                f"{address}: an absolute path of at most {MAX_SOCKET_PATH_BYTES} bytes must follow ipc://"
            )
        return
    host, port = _host_and_port(address)
    if not _is_loopback(host):
        raise EngineStartError(f"{address}: an engine core listens on 127.0.0.1, [::1] or ipc:// only")
    if not 0 < port < 65536:
        raise EngineStartError(f"{address}: the port must lie in [1, 65535]")


def prepare_address(address: str) -> None:
    """Sees to it that an engine core can listen there: makes the directory of an ipc path where it is missing.

    Raises:
        EngineStartError: Another program listens there already, or other users may enter the directory.
    """
    check_address(address)
    if address.startswith(IPC):
        _prepare_path(Path(address.removeprefix(IPC)))
    else:
        _check_port(address)


def _prepare_path(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EngineStartError(f"{path.parent} cannot be made: {error.strerror}") from error
    check_private_directory(path.parent)
    # ZeroMQ would take the path away from another listener.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.settimeout(_PROBE_TIMEOUT_S)
        probe.connect(str(path))
        raise EngineStartError(f"{IPC}{path} is in use by another engine core")


def _check_port(address: str) -> None:
    host, port = _host_and_port(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "is in use by another program" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise EngineStartError(f"{address} cannot be listened on: it {reason}") from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(TCP).rpartition(":")
    if not address.startswith(TCP) or not colon or not port.isdecimal():
        raise EngineStartError(f"{address[:256]}: expected ipc:///path or tcp://127.0.0.1:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
