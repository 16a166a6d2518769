"""The folder of `--state-dir` while a server runs: whether it can be written."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from pathlib import Path

SECRET_FILE = "deployment-secret"  # noqa: S105 (the name of a file)
OTHERS = 0o077
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FolderGoneError(OSError):
    """The folder has been removed."""


class DatabaseReplacedError(OSError):
    """There is a new folder, and nothing is in its database that was written before."""


def is_storage_error(error: BaseException) -> bool:
    """Whether the folder is at fault, and may be well again later."""
    return isinstance(error, OSError | sqlite3.Error)


def cause_of(error: BaseException | None) -> str:
    """The reason why the folder cannot be written, as the end of a sentence that clients may read."""
    if isinstance(error, FolderGoneError):
        return "the folder of the server is not there"
    if getattr(error, "errno", None) in _FULL or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
        return "the disk is full"
    return "the folder of the server cannot be written"


def check_new_folder(folder: Path, secret: bytes) -> None:
    """Returns if a folder in place of the removed one can be used; puts the secret of the deployment into it.

    Without the secret the next server would take every key for another one.

    Raises:
        FolderGoneError: There is none.
        OSError: It is open to others, or cannot be written.
    """
    try:
        status = folder.stat()
    except FileNotFoundError:
        raise FolderGoneError(errno.ENOENT, "the folder has been removed") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & OTHERS:
        raise PermissionError(errno.EPERM, "the folder is open to other users: its permissions must be 700")
    if secret and not (folder / SECRET_FILE).exists():
        file = os.open(folder / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(file, secret)
        finally:
            os.close(file)
