"""A unix socket to serve on: made for its owner alone, never in place of one in use, and gone at the end."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from llmstack_server.errors import ServeError

BACKLOG = 2048
MAX_PATH_BYTES = 107
"""What the address of a unix socket holds on Linux."""


@contextmanager
def unix_socket(path: str, mode: int = 0o600) -> Iterator[socket.socket]:
    """A listening socket at `path`; its file is removed at the end, if it is still ours.

    Raises:
        ServeError: The path cannot be had; the text names it.
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
    """Whether somebody listens; a socket file stays behind when its process is killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # a full backlog, no permission: not ours to take away
    return True


def _bind(listener: socket.socket, path: str, mode: int) -> None:
    # Closed to others from its first moment; `chmod` opens it as far as asked for.
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    os.chmod(path, mode)


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
