"""Folders of one user and one process, and the secrets in their files."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from typing import Final

NUM_SECRET_BYTES: Final = 32
OTHERS: Final = 0o077
_LOCK_INTERVAL_S: Final = 0.05


class PrivateFolderError(Exception):
    """A folder or a file in it is not ours alone, or another process uses it; the text is one sentence."""


def open_folder(name: str, path: str, *, may_create: bool = True) -> int:
    """A descriptor of a folder that is ours alone, which is made if it is not there. Messages begin with `name`.

    Raises:
        PrivateFolderError: It is a link, belongs to another user or is open to others.
        OSError: It cannot be opened or made.
    """
    if may_create:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise PrivateFolderError(f"{name} is a symbolic link, which is not followed")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        check_ours(name, os.fstat(folder), "700")
    except PrivateFolderError:
        os.close(folder)
        raise
    return folder


def check_ours(name: str, status: os.stat_result, mode: str) -> None:
    """Checks the owner and the permissions of an opened file or folder.

    Raises:
        PrivateFolderError: It belongs to another user, or is open to others.
    """
    if status.st_uid != os.geteuid():
        raise PrivateFolderError(f"{name} belongs to another user")
    if status.st_mode & OTHERS:
        raise PrivateFolderError(f"{name} is open to other users: its permissions must be {mode}")


def lock(name: str, folder: int, file: str, *, may_create: bool = True, wait_s: float = 0.0) -> int:
    """A descriptor that holds the lock of a folder until it is closed, or the process ends.

    `wait_s`: How long another process may take to end.

    Raises:
        PrivateFolderError: Another process holds it.
        OSError: The file of the lock cannot be opened.
    """
    import fcntl  # late: few processes have such a folder

    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if may_create else 0)
    held = os.open(file, flags, 0o600, dir_fd=folder)
    end_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end_s:
                time.sleep(_LOCK_INTERVAL_S)
                continue
            os.close(held)
            raise PrivateFolderError(f"{name} is in use by another server") from None
        return held


def read_or_make_secret(name: str, folder: int, file: str) -> bytes:
    """The secret in a file of a folder, which is made of random bytes if it is not there.

    Raises:
        PrivateFolderError: The file has another length, or is not ours alone.
        OSError: It cannot be read or made.
    """
    try:
        return _read_secret(name, folder, file)
    except FileNotFoundError:
        return _made_secret(folder, file)


def _read_secret(name: str, folder: int, file: str) -> bytes:
    # Without waiting: a named pipe would never be opened.
    secret = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(secret)
        named = f"{name}: the file {file}"
        if not stat.S_ISREG(status.st_mode) or status.st_size != NUM_SECRET_BYTES:
            raise PrivateFolderError(f"{named} is not one of {NUM_SECRET_BYTES} bytes")
        check_ours(named, status, "600")
        return os.read(secret, NUM_SECRET_BYTES)
    finally:
        os.close(secret)


def _made_secret(folder: int, file: str) -> bytes:
    """Writes a new secret, whole or not at all."""
    secret, unfinished = os.urandom(NUM_SECRET_BYTES), f"{file}.new"
    with suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=folder)  # of a server that was killed while it wrote
    made = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        os.write(made, secret)
        os.fsync(made)
    finally:
        os.close(made)
    os.rename(unfinished, file, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
    return secret
