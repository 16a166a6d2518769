"""`--state-dir`: the private folder of one server, and the secret in it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from llmstack_server.options.errors import ServeError
from llmstack_server.state.state_folder import OTHERS, SECRET_FILE

LOCK_FILE = "lock"
NUM_SECRET_BYTES = 32


@contextmanager
def deployment_secret(path: str | None) -> Iterator[bytes]:
    """The secret of a deployment: a new one without a folder, else that in the folder, which this server then holds.

    Raises:
        ServeError: The folder or a file in it is not ours alone, or another server uses it; the text is one sentence.
    """
    if path is None:
        yield os.urandom(NUM_SECRET_BYTES)
        return
    with ExitStack() as stack:
        try:
            folder = _opened_folder(path)
            stack.callback(os.close, folder)
            stack.callback(os.close, _locked(path, folder))
            secret = _read_or_made_secret(path, folder)
        except OSError as error:
            raise ServeError(f"--state-dir {path} cannot be used: {error.strerror}") from None
        yield secret


def check_state_folder(path: str) -> bool:
    """Whether the folder exists, and could be used by a server that starts now; nothing is written.

    Raises:
        ServeError: It could not; the text is that of a start.
    """
    if not os.path.lexists(path):
        parent = os.path.dirname(os.path.abspath(path))
        if not os.access(parent, os.W_OK | os.X_OK):
            reason = errno.EACCES if os.path.isdir(parent) else errno.ENOENT
            raise ServeError(f"--state-dir {path} cannot be used: {os.strerror(reason)}")
        return False
    try:
        folder = _checked_folder(path)
    except OSError as error:
        raise ServeError(f"--state-dir {path} cannot be used: {error.strerror}") from None
    try:
        with suppress(FileNotFoundError):  # no server has used it
            os.close(_locked(path, folder, may_create=False))
    finally:
        os.close(folder)
    return True


def _opened_folder(path: str) -> int:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return _checked_folder(path)


def _checked_folder(path: str) -> int:
    """A descriptor of a folder that is ours alone."""
    if stat.S_ISLNK(os.lstat(path).st_mode):
        raise ServeError(f"--state-dir {path} is a symbolic link, which is not followed")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_ours(f"--state-dir {path}", os.fstat(folder), "700")
    except ServeError:
        os.close(folder)
        raise
    return folder


def _check_ours(name: str, status: os.stat_result, mode: str) -> None:
    """Checks the owner and the permissions of an opened file or folder.

    Raises:
        ServeError: It belongs to another user, or is open to others.
    """
    if status.st_uid != os.geteuid():
        raise ServeError(f"{name} belongs to another user")
    if status.st_mode & OTHERS:
        raise ServeError(f"{name} is open to other users: its permissions must be {mode}")


def _locked(path: str, folder: int, *, may_create: bool = True) -> int:
    """A descriptor that holds the lock of the folder until it is closed, or the process ends."""
    import fcntl  # late: few servers have the folder

    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if may_create else 0)
    lock = os.open(LOCK_FILE, flags, 0o600, dir_fd=folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ServeError(f"--state-dir {path} is in use by another server") from None
    return lock


def _read_or_made_secret(path: str, folder: int) -> bytes:
    try:
        return _read_secret(path, folder)
    except FileNotFoundError:
        return _made_secret(folder)


def _read_secret(path: str, folder: int) -> bytes:
    # Without waiting: a named pipe would never be opened.
    file = os.open(SECRET_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(file)
        name = f"--state-dir {path}: the file {SECRET_FILE}"
        if not stat.S_ISREG(status.st_mode) or status.st_size != NUM_SECRET_BYTES:
            raise ServeError(f"{name} is not one of {NUM_SECRET_BYTES} bytes")
        _check_ours(name, status, "600")
        return os.read(file, NUM_SECRET_BYTES)
    finally:
        os.close(file)


def _made_secret(folder: int) -> bytes:
    """Writes a new secret, whole or not at all."""
    secret, unfinished = os.urandom(NUM_SECRET_BYTES), f"{SECRET_FILE}.new"
    with suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=folder)  # of a server that was killed while it wrote
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        os.write(file, secret)
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(unfinished, SECRET_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
    return secret
