"""SQLite files in the folder of `--state-dir`, opened with every check."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llmstack_server.options.errors import ServeError
from llmstack_server.state.state_folder import check_new_folder

# An API process that is asked to end may hold its file for a few seconds.
BUSY_TIMEOUT_S = 10.0
MAX_WAL_BYTES = 8 << 20
_OTHERS = 0o077
_DAMAGED = {"SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_CORRUPT_VTAB", "SQLITE_CORRUPT_INDEX", "SQLITE_CORRUPT_SEQUENCE"}


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables and the version of a database.

    Attributes:
        application_id: The number in the header of the file that says whose it is.
        version: The version of the tables; a file with a higher one was written by a later release.
        statements: The statements that create the tables in an empty file.
        upgrades: The statements that make each version of the one before; files before the first of them are refused.
    """

    application_id: int
    version: int
    statements: tuple[str, ...]
    upgrades: tuple[tuple[str, ...], ...] = ()


class StateConnection(sqlite3.Connection):
    """A connection that knows its file.

    Attributes:
        path: The file.
        identity: Its device and its number: another file may come in its place.
        reopen: Opens the file of that path again.
        secret: The secret of the deployment, of which the folder has a copy.
    """

    path: Path
    identity: tuple[int, int]
    reopen: Callable[[], StateConnection]
    secret: bytes


def present(connection: StateConnection) -> StateConnection:
    """The connection while its file is there; a new one where there is a new folder.

    Raises:
        FolderGoneError: There is no folder now.
        OSError: There is one that cannot be used.
    """
    if _identity_of(connection.path) == connection.identity:
        return connection
    check_new_folder(connection.path.parent, connection.secret)
    try:
        opened = connection.reopen()
    except ServeError as error:
        raise OSError(str(error)) from error
    with suppress(sqlite3.Error):
        connection.close()
    return opened


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def open_database(path: Path, schema: Schema, *, is_shared: bool = False, secret: bytes = b"") -> StateConnection:
    """Opens a database, and makes it where there is none.

    Unless it `is_shared`, no other process may open it until it is closed. `secret`: See `StateConnection`.

    Raises:
        ServeError: It cannot be used; the text is one sentence that names the file.
    """
    name = f"--state-dir {path.parent}: the file {path.name}"
    try:
        _make_private(path, name)
        # One thread uses it at a time, not always the same one. No transaction begins by itself.
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, factory=StateConnection
        )
    except (OSError, sqlite3.Error) as error:
        raise ServeError(f"{name} cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    try:
        with _one_at_a_time(path.parent):
            _set_up(connection, name, schema, is_shared)
    except (OSError, sqlite3.Error) as error:
        connection.close()
        if is_damage(error):
            raise ServeError(f"{name} is damaged or no database: move it away, or restore it") from None
        raise ServeError(f"{name} cannot be used: {error}") from None
    except ServeError:
        connection.close()
        raise
    status = os.stat(path)
    connection.path, connection.identity, connection.secret = path, (status.st_dev, status.st_ino), secret
    connection.reopen = lambda: open_database(path, schema, is_shared=is_shared, secret=secret)
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Writes all that the block writes, or nothing of it where it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself ends one where the disk is full
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lets one process set up a file: SQLite does not wait for another one that changes the journal's mode."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def is_damage(error: BaseException) -> bool:
    """Whether the file itself is at fault."""
    return getattr(error, "sqlite_errorname", "") in _DAMAGED


def _make_private(path: Path, name: str) -> None:
    """Makes an empty file that no other user can read, or checks an existing one."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ServeError(f"{name} is no regular file")
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise ServeError(f"{name} is open to other users or belongs to one: its permissions must be 600")


def _set_up(connection: sqlite3.Connection, name: str, schema: Schema, is_shared: bool) -> None:
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA locking_mode = {'NORMAL' if is_shared else 'EXCLUSIVE'}")
    application_id, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not is_new and application_id != schema.application_id:
        raise ServeError(f"{name} is a database of another program")
    if version > schema.version:
        raise ServeError(f"{name} was written by a later release of llmstack, which this one cannot read")
    if not is_new and version < schema.version - len(schema.upgrades):
        raise ServeError(f"{name} was written by an earlier release of llmstack, which this one cannot read")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute(f"PRAGMA journal_size_limit = {MAX_WAL_BYTES}")
    connection.execute("BEGIN EXCLUSIVE")
    later = schema.upgrades[len(schema.upgrades) - (schema.version - version) :]
    for statement in schema.statements if is_new else (one for upgrade in later for one in upgrade):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {schema.application_id}")
    connection.execute(f"PRAGMA user_version = {schema.version}")
    connection.execute("COMMIT")
    if not is_new and connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
        raise ServeError(f"{name} is damaged or no database: move it away, or restore it")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
