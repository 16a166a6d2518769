"""Answers that outlive their connections in a database: rows in and out."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from llmstack_server.options.errors import ServeError
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.database import Schema, open_database, present, transaction
from llmstack_server.state.state_folder import DatabaseReplacedError
from llmstack_server.state.stream_record import Head

FILE_NAME: Final = "streams.sqlite3"
# What is older was given up: its client would have to wait this long for a server.
MAX_DOWNTIME_S: Final = 600.0
# From which byte on, and the bytes.
_CUTS: Final = """CREATE TABLE cuts (
    stream TEXT NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (stream, start)
) WITHOUT ROWID"""
SCHEMA: Final = Schema(
    application_id=0x6C6C6D73,  # "llms"
    version=2,
    statements=(
        """CREATE TABLE streams (
            id TEXT PRIMARY KEY, owner TEXT NOT NULL, digest TEXT NOT NULL, request_key TEXT, keep_s REAL NOT NULL,
            path TEXT NOT NULL, body BLOB NOT NULL, headers TEXT NOT NULL, seed INTEGER NOT NULL,
            identity TEXT NOT NULL, num_resumes INTEGER NOT NULL, head TEXT, is_over INTEGER NOT NULL,
            written_at REAL NOT NULL, drawn TEXT NOT NULL DEFAULT '[]'
        )""",
        """CREATE TABLE parts (
            stream TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (stream, number)
        ) WITHOUT ROWID""",
        _CUTS,
    ),
    upgrades=(("ALTER TABLE streams ADD COLUMN drawn TEXT NOT NULL DEFAULT '[]'", _CUTS),),
)


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A kept request, from which the same answer can be generated again.

    Attributes:
        headers: The headers of the request that its answer depends on.
        seed: The seed from which seeds that the body lacks are drawn.
        identity: The numeric contract id of the model.
        num_resumes: How many servers have begun it again.
    """

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...]
    seed: int
    identity: str
    num_resumes: int = 0


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One answer of an earlier server.

    Attributes:
        source: Of an answer that has not ended.
    """

    id: str
    owner: str
    digest: str
    key: str | None
    keep_s: float
    request: KeptRequest
    head: Head | None
    is_over: bool
    source: AnswerSource
    parts: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the rows of one answer.

    Attributes:
        row: The answer, without its parts; None where its rows are to be deleted.
        is_new: Whether it has no row yet.
        first: The number of the first of `parts`, from 0 on.
        cuts: Those of its source, from the byte `cut_start` on.
    """

    stream_id: str
    row: StreamRow | None
    is_new: bool = False
    first: int = 0
    parts: tuple[bytes, ...] = ()
    cut_start: int = 0
    cuts: bytes = b""


class StreamRows:
    """The rows of all API processes of a server; used by one thread at a time."""

    def __init__(self, folder: Path, secret: bytes = b"") -> None:
        """Opens the database, or makes it.

        Raises:
            ServeError: It cannot be used; the text is one sentence.
        """
        self._name = f"--state-dir {folder}: the file {FILE_NAME}"
        self._connection = open_database(folder / FILE_NAME, SCHEMA, is_shared=True, secret=secret)

    def close(self) -> None:
        """Closes the database; nothing may follow."""
        self._connection.close()

    def load(self, index: int, count: int, now: float) -> list[StreamRow]:
        """The answers of the process `index` of `count`; those that are too old are deleted.

        Raises:
            ServeError: A row is not as this program writes it.
        """
        try:
            return self._load(index, count, now)
        except (sqlite3.Error, TypeError, ValueError, AttributeError) as error:
            raise ServeError(f"{self._name} is damaged ({type(error).__name__}): move it away, or restore it") from None

    def write(self, changes: Iterable[Change], now: float) -> None:
        """Writes all changes or none.

        Raises:
            sqlite3.Error, OSError: The disk is full, or the file cannot be written.
            DatabaseReplacedError: Another file came in place of the one that had all rows.
        """
        before, self._connection = self._connection, present(self._connection)
        if self._connection is not before:
            raise DatabaseReplacedError
        with transaction(self._connection):
            for change in changes:
                self._write(change, now)

    def _write(self, change: Change, now: float) -> None:
        row = change.row
        if row is None:
            self._delete(change.stream_id)
            return
        head, drawn = None if row.head is None else _encoded_head(row.head), json.dumps(row.source.values)
        if change.is_new:
            request = row.request
            self._connection.execute(
                "INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    row.id, row.owner, row.digest, row.key, row.keep_s, request.path, request.body,
                    json.dumps(request.headers), request.seed, request.identity, request.num_resumes, head,
                    row.is_over, now, drawn,
                ),
            )  # fmt: skip
        else:
            self._connection.execute(
                "UPDATE streams SET num_resumes = ?, head = ?, is_over = ?, written_at = ?, drawn = ? WHERE id = ?",
                (row.request.num_resumes, head, row.is_over, now, drawn, row.id),
            )
        numbered = enumerate(change.parts, change.first)
        self._connection.executemany(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?)", [(row.id, number, part) for number, part in numbered]
        )
        if row.is_over:
            self._connection.execute("DELETE FROM cuts WHERE stream = ?", (row.id,))
        elif change.cuts:
            cuts = (row.id, change.cut_start, change.cuts)
            self._connection.execute("INSERT OR REPLACE INTO cuts VALUES (?, ?, ?)", cuts)

    def _delete(self, stream_id: str) -> None:
        self._connection.execute("DELETE FROM streams WHERE id = ?", (stream_id,))
        self._delete_begun(stream_id)

    def _delete_begun(self, stream_id: str) -> None:
        for table in ("parts", "cuts"):
            # The names are constants of this module.
            self._connection.execute(f"DELETE FROM {table} WHERE stream = ?", (stream_id,))  # noqa: S608

    def _load(self, index: int, count: int, now: float) -> list[StreamRow]:
        found = []
        columns = self._connection.execute("SELECT * FROM streams ORDER BY rowid").fetchall()
        for *fields, written_at, drawn in columns:
            cuts = self._connection.execute("SELECT data FROM cuts WHERE stream = ? ORDER BY start", fields[:1])
            row = _read_row(fields, AnswerSource(json.loads(drawn), b"".join([data for (data,) in cuts])))
            if int(row.id, 16) % count != index:
                continue
            if now - written_at > MAX_DOWNTIME_S:
                with transaction(self._connection):
                    self._delete(row.id)
                continue
            if row.is_over or (row.head is not None and row.head.is_stream):
                query = "SELECT data FROM parts WHERE stream = ? ORDER BY number"
                row.parts.extend(data for (data,) in self._connection.execute(query, (row.id,)))
            else:  # a part of a whole answer, which is generated again
                row = replace(row, source=AnswerSource(row.source.values))
                with transaction(self._connection):
                    self._delete_begun(row.id)
            if not all(isinstance(part, bytes) for part in row.parts):
                raise TypeError("a column has another type")
            found.append(row)
        return found


def _read_row(fields: list[Any], source: AnswerSource) -> StreamRow:
    stream_id, owner, digest, key, keep_s, path, body, headers, seed, identity, num_resumes, head, is_over = fields
    texts = (stream_id, owner, digest, path, headers, identity)
    if not all(isinstance(text, str) for text in texts) or not isinstance(key, str | None):
        raise TypeError("a column has another type")
    if not (isinstance(body, bytes) and isinstance(keep_s, float) and isinstance(seed, int)):
        raise TypeError("a column has another type")
    pairs = tuple((str(name), str(value)) for name, value in json.loads(headers))
    request = KeptRequest(path, body, pairs, seed, identity, int(num_resumes))
    is_finished = bool(is_over)
    return StreamRow(stream_id, owner, digest, key, keep_s, request, _decoded_head(head), is_finished, source)


def _encoded_head(head: Head) -> str:
    pairs = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.headers]
    return json.dumps([head.status, pairs, head.is_stream])


def _decoded_head(text: str | None) -> Head | None:
    if text is None:
        return None
    status, pairs, is_stream = json.loads(text)
    headers = tuple((str(name).encode("latin-1"), str(value).encode("latin-1")) for name, value in pairs)
    return Head(int(status), headers, bool(is_stream))
