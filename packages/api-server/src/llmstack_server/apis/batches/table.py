"""Files and batches in a database that the API processes of a server share."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmstack_server.state.database import Schema, open_database, present, transaction
from llmstack_types import InvalidRequestError
from llmstack_types.json_values import JSONObject

SCHEMA: Final = Schema(
    application_id=0x6C6C6D62,  # "llmb"
    version=2,
    statements=(
        """CREATE TABLE files (
            id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER,
            num_bytes INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL
        )""",
        "CREATE INDEX files_of_owner ON files (owner, created_at)",
        # `process` is the API process that runs the batch; `ended` says that it never changes again.
        # `is_read` says that its lines are being read, `attempts` how often a process ended meanwhile.
        # `work_bytes` are those of its answers before they are a file.
        """CREATE TABLE batches (
            id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, process INTEGER NOT NULL,
            ended INTEGER NOT NULL, data TEXT NOT NULL, is_read INTEGER NOT NULL DEFAULT 0,
            attempts INTEGER NOT NULL DEFAULT 0, work_bytes INTEGER NOT NULL DEFAULT 0
        )""",
        "CREATE INDEX batches_of_owner ON batches (owner, created_at)",
    ),
    upgrades=(
        (
            "ALTER TABLE batches ADD COLUMN is_read INTEGER NOT NULL DEFAULT 0",
            "ALTER TABLE batches ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0",
            "ALTER TABLE batches ADD COLUMN work_bytes INTEGER NOT NULL DEFAULT 0",
        ),
    ),
)
MAX_FILES = 10_000


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A row of a file; times are seconds since 1970."""

    id: str
    owner: str
    created_at: int
    expires_at: int | None
    num_bytes: int
    filename: str
    purpose: str

    def as_object(self) -> JSONObject:
        """The `file` object of the API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """A batch that has not ended; see the columns of the table."""

    owner: str
    attempts: int
    batch: JSONObject


class BatchTable:
    """Rows in and out; used by one thread at a time. Limits hold for all processes together."""

    def __init__(self, path: Path, secret: bytes = b"") -> None:
        """Opens the database, or makes it.

        Raises:
            ServeError: It cannot be used; the text is one sentence.
        """
        self._connection = open_database(path, SCHEMA, is_shared=True, secret=secret)

    def close(self) -> None:
        """Closes the database; nothing may follow."""
        self._connection.close()

    def check(self) -> bool:
        """Checks that the file exists; False where a new one, without rows, came in its place.

        Raises:
            OSError: There is no folder, or it cannot be used.
        """
        before, self._connection = self._connection, present(self._connection)
        return before is self._connection

    def add_file(self, file: StoredFile, max_bytes: int | None = None) -> None:
        """Adds the row of a file.

        Raises:
            InvalidRequestError: The owner has too many files, or more than `max_bytes` with this one.
        """
        row = (file.id, file.owner, file.created_at, file.expires_at, file.num_bytes, file.filename, file.purpose)
        with transaction(self._connection):
            if max_bytes is not None:
                self.check_share(file.owner, file.num_bytes, max_bytes)
            self._connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def check_share(self, owner: str, num_bytes: int, max_bytes: int) -> None:
        """Checks that one more file of so many bytes fits into the share of an owner.

        Raises:
            InvalidRequestError: It does not.
        """
        number, used = self.usage(owner)
        if number >= MAX_FILES:
            raise InvalidRequestError(f"At most {MAX_FILES} files are kept; delete some.", code="file_quota_exceeded")
        if used + num_bytes > max_bytes:
            message = f"The files of one API key may have {max_bytes} bytes; delete some."
            raise InvalidRequestError(message, code="file_quota_exceeded")

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        """The file, if there is one and it belongs to `owner`."""
        query = "SELECT * FROM files WHERE id = ? AND owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        row = self._connection.execute(query, (file_id, owner, int(time.time()))).fetchone()
        return None if row is None else StoredFile(*row)

    def files(self, owner: str) -> list[StoredFile]:
        """The files of one owner, the newest first."""
        query = "SELECT * FROM files WHERE owner = ? ORDER BY created_at DESC, rowid DESC"
        return [StoredFile(*row) for row in self._connection.execute(query, (owner,))]

    def usage(self, owner: str) -> tuple[int, int]:
        """Number of the files of one owner, and bytes of these and of the answers of batches that run."""
        query = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE owner = ?"
        number, num_bytes = self._connection.execute(query, (owner,)).fetchone()
        query = "SELECT coalesce(sum(work_bytes), 0) FROM batches WHERE owner = ? AND NOT ended"
        return number, num_bytes + self._connection.execute(query, (owner,)).fetchone()[0]

    def delete_file(self, file_id: str) -> None:
        """Removes a row, if there is one."""
        with transaction(self._connection):
            self._connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def expired_files(self, now: int) -> list[str]:
        """Ids of the files whose time is over."""
        query = "SELECT id FROM files WHERE expires_at IS NOT NULL AND expires_at <= ? LIMIT 1000"
        return [row[0] for row in self._connection.execute(query, (now,))]

    def add_batch(self, batch: JSONObject, owner: str, process: int, max_batches: int, max_unfinished: int) -> bool:
        """Adds a batch; False where `max_unfinished` of the owner have not ended.

        Where there are more than `max_batches`, the owner's oldest that ended are forgotten.
        """
        row = (batch["id"], owner, batch["created_at"], process, False, json.dumps(batch))
        old = (
            "DELETE FROM batches WHERE ended AND owner = ? AND id NOT IN "
            "(SELECT id FROM batches WHERE owner = ? ORDER BY created_at DESC, rowid DESC LIMIT ?)"
        )
        with transaction(self._connection):
            if self._num_unfinished(owner) >= max_unfinished:
                return False
            self._connection.execute(
                "INSERT INTO batches (id, owner, created_at, process, ended, data) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            self._connection.execute(old, (owner, owner, max_batches))
        return True

    def batch(self, batch_id: str, owner: str) -> JSONObject | None:
        """The object of a batch, if it belongs to `owner`."""
        query = "SELECT data FROM batches WHERE id = ? AND owner = ?"
        row = self._connection.execute(query, (batch_id, owner)).fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def batches(self, owner: str) -> list[JSONObject]:
        """The objects of one owner's batches, the newest first."""
        query = "SELECT data FROM batches WHERE owner = ? ORDER BY created_at DESC, rowid DESC"
        return [json.loads(row[0]) for row in self._connection.execute(query, (owner,))]

    def _num_unfinished(self, owner: str) -> int:
        query = "SELECT count(*) FROM batches WHERE owner = ? AND NOT ended"
        return int(self._connection.execute(query, (owner,)).fetchone()[0])

    def has_batch(self, batch_id: str) -> bool:
        """Whether there is a batch with this id."""
        return self._connection.execute("SELECT 1 FROM batches WHERE id = ?", (batch_id,)).fetchone() is not None

    def unfinished(self, process: int, num_processes: int) -> list[UnfinishedBatch]:
        """The batches that a process runs, the oldest first."""
        query = (
            "SELECT owner, attempts, data FROM batches WHERE NOT ended AND process % ? = ? ORDER BY created_at, rowid"
        )
        rows = self._connection.execute(query, (num_processes, process))
        return [UnfinishedBatch(owner, attempts, json.loads(data)) for owner, attempts, data in rows]

    def note_reading(self, batch_id: str, is_read: bool) -> None:
        """Notes that the lines of a batch are being read, or not any more."""
        with transaction(self._connection):
            self._connection.execute("UPDATE batches SET is_read = ? WHERE id = ?", (is_read, batch_id))

    def count_interrupted(self, process: int, num_processes: int) -> None:
        """Counts an attempt for each batch that an earlier process was reading when it ended."""
        query = (
            "UPDATE batches SET attempts = attempts + 1, is_read = 0 WHERE is_read AND NOT ended AND process % ? = ?"
        )
        with transaction(self._connection):
            self._connection.execute(query, (num_processes, process))

    def set_work_bytes(self, batch_id: str, num_bytes: int) -> None:
        """Notes how many bytes of answers a batch has."""
        with transaction(self._connection):
            self._connection.execute("UPDATE batches SET work_bytes = ? WHERE id = ?", (num_bytes, batch_id))

    def add_work_bytes(self, batch_id: str, owner: str, num_bytes: int, max_bytes: int) -> bool:
        """Counts an answer of a batch; False where the owner's share has no room for it."""
        with transaction(self._connection):
            if self.usage(owner)[1] + num_bytes > max_bytes:
                return False
            query = "UPDATE batches SET work_bytes = work_bytes + ? WHERE id = ?"
            self._connection.execute(query, (num_bytes, batch_id))
        return True

    def change_batch(
        self, batch_id: str, changes: JSONObject, *, statuses: Sequence[str] = (), ended: bool = False
    ) -> JSONObject | None:
        """The object with the changes; None where there is none, or it has none of `statuses`."""
        with transaction(self._connection):
            row = self._connection.execute("SELECT data FROM batches WHERE id = ?", (batch_id,)).fetchone()
            batch = None if row is None else json.loads(row[0])
            if batch is None or (statuses and batch["status"] not in statuses):
                return None
            batch.update(changes)
            query = "UPDATE batches SET data = ?, ended = ? WHERE id = ?"
            self._connection.execute(query, (json.dumps(batch), ended, batch_id))
            return dict(batch)
