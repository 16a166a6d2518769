"""ZeroMQ sockets over ipc, in a private directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

import zmq

from llmstack_engine_core.ipc.key_check import check_public_keys
from llmstack_engine_core.ipc.keys import Keys, keys_for
from llmstack_engine_core.ipc.link import Link
from llmstack_engine_core.messages.protocol import MAX_CLIENT_FRAME_BYTES, MAX_ENGINE_FRAME_BYTES
from llmstack_types import EngineStartError

DIRECTORY_PREFIX: Final = "llmstack-"
ENGINE_SOCKET_NAME: Final = "engine.sock"
MAX_SOCKET_PATH_BYTES: Final = 107  # `sun_path` of Linux, less its terminator; macOS has four fewer
# Messages that wait in either direction before a sender has to wait.
HIGH_WATER_MARK: Final = 8192
# Two peers on one machine: short waits, and a send that the other side no longer reads does not delay an exit for long.
RECONNECT_MS: Final = 20
MAX_RECONNECT_MS: Final = 1000  # to another machine
HANDSHAKE_MS: Final = 5000
ENGINE_LINGER_MS: Final = 1000
_POLLIN: Final = int(zmq.POLLIN)  # the flag's own operators are Python code


def name_private_directory() -> Path:
    """A free name for a private directory, in `XDG_RUNTIME_DIR` where there is one.

    Raises:
        EngineStartError: There is no place for one.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = Path(runtime if runtime and os.access(runtime, os.W_OK | os.X_OK) else tempfile.gettempdir())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise EngineStartError(f"no directory for sockets can be made in {parent}; set TMPDIR")
    directory = parent / f"{DIRECTORY_PREFIX}{secrets.token_hex(4)}"
    if len(os.fsencode(directory / ENGINE_SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
        raise EngineStartError("the path of the directory for sockets is too long; set TMPDIR to a shorter one")
    return directory


def make_private_directory(directory: Path | None = None) -> Path:
    """Makes a directory of mode 0700, by a fresh name if none is given; the caller removes it.

    Raises:
        EngineStartError: It cannot be made, or it is not ours alone.
    """
    directory = directory or name_private_directory()
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise EngineStartError(f"no directory for sockets can be made: {error.strerror}; set TMPDIR") from error
    check_private_directory(directory)
    return directory


def check_private_directory(directory: Path) -> None:
    """Refuses a directory that is not ours alone.

    Raises:
        EngineStartError: Another user owns it or may enter it, or it is no directory.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise EngineStartError(f"the directory for sockets cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise EngineStartError("the directory for sockets is open to other users")


def private_address(directory: Path) -> str:
    """The address of the engine core of a private directory."""
    return f"ipc://{directory / ENGINE_SOCKET_NAME}"


def remove_places(directory: Path, address: str) -> None:
    """Removes what an engine core leaves in the file system: its private directory, and its socket elsewhere."""
    shutil.rmtree(directory, ignore_errors=True)
    if address.startswith("ipc://"):
        with contextlib.suppress(OSError):
            os.unlink(address.removeprefix("ipc://"))


def bind_engine_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: str, key_file: str | None = None, heartbeat_timeout_s: float = 0.0
) -> zmq.Socket[bytes]:
    """The engine core's end: a ROUTER that answers each client by its identity.

    A message to a client that is gone raises `zmq.ZMQError`, and one to a client that does not read raises `zmq.Again`.

    `heartbeat_timeout_s`: A connection over TCP without a sign of life for so long is closed; 0 asks for none.

    Raises:
        EngineStartError: Others may enter the address's directory, or it cannot be listened on.
    """
    keys = keys_for(address, key_file)
    socket = context.socket(zmq.ROUTER)
    if keys is not None:
        serve_keys(context, socket, keys)
        set_heartbeats(socket, heartbeat_timeout_s)
    _set_limits(socket, MAX_CLIENT_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, ENGINE_LINGER_MS)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        _bind(socket, address)
    except zmq.ZMQError as error:
        socket.close()
        raise EngineStartError(f"{address} cannot be listened on: {error.strerror}") from error
    return socket


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    if not address.startswith("ipc://"):
        socket.bind(address)
        return
    directory = Path(address.removeprefix("ipc://")).parent
    check_private_directory(directory)
    socket.bind(address)
    check_private_directory(directory)


def serve_keys(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Encrypts the connections of a socket that listens; the one of its context that does."""
    check_public_keys(context, keys.accepted)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"llmstack")
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def use_keys(socket: zmq.Socket[object], keys: Keys, server_key: bytes | None = None) -> None:
    """Encrypts the connection of a socket that connects.

    `server_key`: The public key of the other end; None is the one that both have in use.
    """
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key or keys.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def set_heartbeats(socket: zmq.Socket[object], timeout_s: float) -> None:
    """Closes connections without a sign of life for so long; ZeroMQ's own threads ask for it and answer."""
    if timeout_s:
        timeout_ms = max(1, int(timeout_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, timeout_ms // 4))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_TTL, timeout_ms)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, timeout_ms)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)


def connect_client_socket(
    context: zmq.Context[zmq.Socket[bytes]], address: str, client_index: int = 0, link: Link | None = None
) -> zmq.Socket[bytes]:
    """A client's end: a DEALER; it may connect before the engine core has bound.

    Its identity begins with its index, and is its own even where two servers share an engine core.
    """
    link = link or Link()
    keys = keys_for(address, link.key_file)
    socket = context.socket(zmq.DEALER)
    if keys is not None:
        use_keys(socket, keys, link.server_key)
    _set_limits(socket, MAX_ENGINE_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    if keys is not None:
        set_heartbeats(socket, link.heartbeat_timeout_s)
    socket.setsockopt(zmq.ROUTING_ID, link.identity(client_index))
    socket.connect(address)
    return socket


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """True when a receive would not wait; a fifth of the cost of an attempt that fails (1.5 against 7 microseconds)."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def _set_limits(socket: zmq.Socket[bytes], max_frame_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
