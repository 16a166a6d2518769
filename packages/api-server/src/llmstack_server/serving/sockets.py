"""Listening sockets, TCP and unix, bound before anything is loaded."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.errors import ServeError

BACKLOG = 2048
MAX_PATH_BYTES = 107
"""The longest path of a unix socket on Linux."""


@contextmanager
def unix_socket(path: str, mode: int = 0o600) -> Iterator[socket.socket]:
    """A listening socket at `path`, for its owner alone and never in place of one in use.

    The file is removed at the end, unless another process has replaced it.

    Raises:
        ServeError: The path cannot be used; the text names it.
    """
    _check_path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            _bind(listener, path, mode)
            listener.listen(BACKLOG)
            identity = _identity(path)
        except OSError as error:
            raise ServeError(f"--uds {path}: {error.strerror}") from None
        listener.setblocking(False)
        try:
            yield listener
        finally:
            with suppress(OSError):
                if _identity(path) == identity:
                    os.unlink(path)


def _check_path(path: str) -> None:
    if not path or "\0" in path:
        raise ServeError("--uds: the path of a socket file is needed", exit_code=2)
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ServeError(f"--uds {path[:200]}: the path of a socket has at most {MAX_PATH_BYTES} bytes", exit_code=2)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ServeError(f"--uds {path}: {error.strerror}") from None
    if not stat.S_ISSOCK(status.st_mode):
        raise ServeError(f"--uds {path}: there is a file that is no socket; choose another path")
    if _is_alive(path):
        raise ServeError(f"--uds {path} is in use by another program; choose another path")
    os.unlink(path)


def _is_alive(path: str) -> bool:
    """Whether a process listens on it; the file of a killed process remains."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # a full backlog, or no permission: it is in use
    return True


def _bind(listener: socket.socket, path: str, mode: int) -> None:
    # Created for its owner alone; `chmod` grants what `mode` allows.
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    os.chmod(path, mode)


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket, made before anything is loaded: a port in use is reported at once.

    It listens already, since two processes can bind one address as long as neither listens.

    Raises:
        ServeError: The address cannot be used; the text names the flag to change.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_user_timeout(listener)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServeError(_bind_message(error, host, port)) from None
    listener.setblocking(False)
    return listener


def _set_user_timeout(listener: socket.socket) -> None:
    """Closes connections whose client reads nothing for a minute, so that its requests free their blocks.

    Accepted sockets inherit the option.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        listener.setsockopt(socket.IPPROTO_TCP, option, 60_000)


def _bind_message(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program; choose another one with --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is reserved for the administrator; choose one above 1023 with --port"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        return f"{host} is not an address of this machine; choose another one with --host"
    return f"cannot listen on {host} port {port} (--host, --port): {error.strerror or error}"


def url_of(listener: socket.socket) -> str:
    """The URL of a TCP socket, with the port that was chosen."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def listening(http: HTTPConfig) -> Iterator[socket.socket]:
    """The listening socket of a server; at the end it is closed, and the file of a unix socket removed.

    Raises:
        ServeError: The address cannot be used, or a file of the TLS configuration.
    """
    if http.tls is not None:
        from llmstack_server.serving.tls import make_tls_context

        make_tls_context(http.tls)  # checks the files; the server makes its own context later
    if http.uds is not None:
        with unix_socket(http.uds, http.uds_mode) as listener:
            yield listener
    else:
        with bind_socket(http.host, http.port) as listener:
            yield listener


def address_of(http: HTTPConfig, listener: socket.socket) -> str:
    """The address of the server in the form that users type."""
    if http.uds is not None:
        return f"unix:{http.uds}"
    url = url_of(listener)
    return url if http.tls is None else url.replace("http://", "https://", 1)
