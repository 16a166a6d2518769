"""Addresses of engine cores.

`ipc://` paths in private directories, or TCP ports of the loopback interface.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Final

from llmstack_engine_core.ipc.sockets import MAX_SOCKET_PATH_BYTES, check_private_directory
from llmstack_types import EngineStartError

IPC: Final = "ipc://"
TCP: Final = "tcp://"
_PROBE_TIMEOUT_S: Final = 1.0
_SIOCGIFADDR: Final = 0x8915
_REQUEST: Final = struct.Struct("256s")
_ADDRESS: Final = slice(20, 24)


def check_address(address: str, *, is_remote: bool = False) -> None:
    """Refuses an address that is malformed, or that other machines can reach.

    `is_remote`: They are meant to reach it, by the address of one interface.

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
    if is_remote:
        _check_named(address, host)
    elif not _is_loopback(host):
        raise EngineStartError(f"{address}: an engine core listens on 127.0.0.1, [::1] or ipc:// only")
    if not 0 < port < 65536:
        raise EngineStartError(f"{address}: the port must lie in [1, 65535]")


def prepare_address(address: str, *, is_remote: bool = False) -> None:
    """Sees to it that an engine core can listen there: makes the directory of an ipc path where it is missing.

    Raises:
        EngineStartError: Another program listens there already, or other users may enter the directory.
    """
    check_address(address, is_remote=is_remote)
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


def own_host(other_host: str) -> str:
    """The address of this machine on the way to the other host.

    Raises:
        EngineStartError: There is no way to it.
    """
    try:
        family, _, _, _, other = socket.getaddrinfo(other_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(other)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineStartError(f"{other_host[:256]} cannot be reached: {error.strerror}") from error


def free_addresses(other_host: str, number: int) -> list[str]:
    """Free addresses of this machine that the other host can connect to.

    Raises:
        EngineStartError: There is no way to it.
    """
    host = own_host(other_host)
    return [tcp_address(host, free_port(host)) for _ in range(number)]


def resolved(host: str) -> str:
    """The IP address of a host; an address is its own.

    Raises:
        EngineStartError: There is none.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise EngineStartError(f"{host[:256]} has no address: {error.strerror}") from error


def tcp_address(host: str, port: int) -> str:
    """`tcp://host:port`, where an IPv6 address has its brackets."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def free_port(host: str) -> int:
    """A port on which an engine core can listen.

    Raises:
        EngineStartError: The host is no address of this machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise EngineStartError(f"{host[:256]} cannot be listened on: {error.strerror}") from error
        return int(probe.getsockname()[1])


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        EngineStartError: There is none, or the interface is not there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, _REQUEST.pack(name.encode()[:15]))
        except OSError as error:
            known = ", ".join(known for _, known in socket.if_nameindex())
            raise EngineStartError(
                f"--trust-cluster-network {name[:64]}: this machine has no such network interface with an IPv4 "
                f"address; it has {known}"
            ) from error
    return socket.inet_ntoa(found[_ADDRESS])


def _check_named(address: str, host: str) -> None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise EngineStartError(f"{address[:256]}: the host must be an IP address") from None
    if ip.is_unspecified or ip.is_multicast:
        raise EngineStartError(f"{address}: an engine core listens on one address of the machine, not on all")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
