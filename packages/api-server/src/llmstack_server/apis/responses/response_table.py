"""Stored responses in a database: rows in and out, without threads."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmstack_server.apis.responses.event_log import EventLog
from llmstack_server.apis.responses.store import StoredItem, StoredResponse
from llmstack_server.options.errors import ServeError
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.database import Schema, open_database, present, transaction
from llmstack_server.state.state_folder import DatabaseReplacedError

# Of the source of events: what was drawn, and the cuts with the byte that they begin at.
_SOURCES: Final = "CREATE TABLE sources (response TEXT PRIMARY KEY, drawn TEXT NOT NULL) WITHOUT ROWID"
_CUTS: Final = """CREATE TABLE cuts (
    response TEXT NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (response, start)
) WITHOUT ROWID"""
SCHEMA: Final = Schema(
    application_id=0x6C6C6D73,  # "llms"
    version=2,
    statements=(
        # `ended_at` is null while a response runs; `journal` is what generates it again.
        """CREATE TABLE responses (
            id TEXT PRIMARY KEY, owner TEXT NOT NULL, is_background INTEGER NOT NULL, has_events INTEGER NOT NULL,
            ended_at REAL, data BLOB NOT NULL, journal BLOB NOT NULL
        )""",
        """CREATE TABLE items (
            response TEXT NOT NULL, is_output INTEGER NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL,
            data BLOB NOT NULL, PRIMARY KEY (response, is_output, place)
        ) WITHOUT ROWID""",
        """CREATE TABLE events (
            response TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (response, number)
        ) WITHOUT ROWID""",
        _SOURCES,
        _CUTS,
    ),
    upgrades=((_SOURCES, _CUTS),),
)
# About what a response takes.
_PROBE, _PROBE_BYTES = "probe", 16 << 10
_DELETIONS = (
    "DELETE FROM responses WHERE id = ?",
    "DELETE FROM items WHERE response = ?",
    "DELETE FROM events WHERE response = ?",
    "DELETE FROM sources WHERE response = ?",
    "DELETE FROM cuts WHERE response = ?",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the rows of one response.

    Attributes:
        stored: None removes the response.
        ended_at: When it ended, by the clock of the world; None while it runs.
        events: The events from the number `first_event` on; earlier ones are there already.
        drawn: The values of its source, as JSON; empty where it has none.
        cuts: Those of its source, from the byte `cut_start` on.
    """

    response_id: str
    stored: StoredResponse | None
    ended_at: float | None = None
    data: bytes = b""
    journal: bytes = b""
    output_items: tuple[StoredItem, ...] = ()
    is_new: bool = False
    first_event: int = 0
    events: tuple[bytes, ...] = ()
    drawn: str = ""
    cut_start: int = 0
    cuts: bytes = b""

    @property
    def num_bytes(self) -> int:
        """About how much is written."""
        stored = self.stored
        items = sum(len(item.data) for item in stored.input_items) if stored is not None and self.is_new else 0
        return len(self.data) + len(self.journal) + items + sum(map(len, self.events)) + len(self.cuts)


def database_path(folder: str | Path, process_index: int) -> Path:
    """The database of one API process."""
    return Path(folder) / f"responses-{process_index}.sqlite3"


class ResponseTable:
    """The rows of one API process's responses; used by one thread at a time."""

    def __init__(self, path: Path, secret: bytes = b"") -> None:
        """Opens the database, or makes it.

        Raises:
            ServeError: It cannot be used; the text is one sentence.
        """
        self._path = path
        self._connection = open_database(path, SCHEMA, secret=secret)

    def close(self) -> None:
        """Closes the file, and empties its log."""
        self._connection.close()

    def load(self, now: float, clock_s: float) -> list[StoredResponse]:
        """All responses, those first that ended first; running ones last.

        `now`, `clock_s`: The time of the world, and of the clock of the store.

        Raises:
            ServeError: A row is not as this program writes it.
        """
        try:
            return list(self._load(now, clock_s))
        except (sqlite3.Error, TypeError, ValueError) as error:
            name = f"--state-dir {self._path.parent}: the file {self._path.name}"
            raise ServeError(f"{name} is damaged ({type(error).__name__}): move it away, or restore it") from None

    def adopt(self, path: Path) -> None:
        """Moves the rows of another process's database here: that of a process that there is no more.

        Raises:
            ServeError: The file cannot be used.
        """
        ResponseTable(path).close()  # checks it, and empties its log
        self._connection.execute("ATTACH DATABASE ? AS other", (str(path),))
        try:
            with transaction(self._connection):
                for table in ("responses", "items", "events", "sources", "cuts"):
                    # The names are constants of this module.
                    self._connection.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM other.{table}")  # noqa: S608
        except sqlite3.Error as error:
            raise ServeError(f"the rows of {path} cannot be moved: {error}") from None
        finally:
            self._connection.execute("DETACH DATABASE other")
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)

    def write(self, changes: Iterable[Change]) -> None:
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
                self._write(change)

    def probe(self) -> None:
        """Writes and removes some bytes; raises as `write`."""
        self.write([Change(_PROBE, StoredResponse(_PROBE, "", ()), data=bytes(_PROBE_BYTES), is_new=True)])
        self.write([Change(_PROBE, None)])

    def _write(self, change: Change) -> None:
        execute, stored = self._connection.execute, change.stored
        if stored is None or change.is_new:
            for statement in _DELETIONS:
                execute(statement, (change.response_id,))
        if stored is None:
            return
        if change.is_new:
            execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    stored.id, stored.owner, stored.is_background, stored.events is not None,
                    change.ended_at, change.data, change.journal,
                ),
            )  # fmt: skip
            self._add_items(stored.id, False, stored.input_items)
        else:
            execute(
                "UPDATE responses SET ended_at = ?, data = ?, journal = ? WHERE id = ?",
                (change.ended_at, change.data, change.journal, stored.id),
            )
        self._add_items(stored.id, True, change.output_items)
        numbered = enumerate(change.events, change.first_event)
        self._connection.executemany(
            "INSERT OR REPLACE INTO events VALUES (?, ?, ?)", [(stored.id, number, event) for number, event in numbered]
        )
        if change.drawn:
            execute("INSERT OR REPLACE INTO sources VALUES (?, ?)", (stored.id, change.drawn))
            execute("INSERT OR REPLACE INTO cuts VALUES (?, ?, ?)", (stored.id, change.cut_start, change.cuts))
        elif change.ended_at is not None and change.events:
            for statement in _DELETIONS[-2:]:
                execute(statement, (stored.id,))

    def _add_items(self, response_id: str, is_output: bool, items: Sequence[StoredItem]) -> None:
        rows = [(response_id, is_output, place, item.id, item.data) for place, item in enumerate(items)]
        self._connection.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?)", rows)

    def _load(self, now: float, clock_s: float) -> Iterator[StoredResponse]:
        # The items of earlier turns are in each later response; in memory they are there once.
        shared: dict[tuple[str, StoredItem], StoredItem] = {}
        rows = self._connection.execute("SELECT * FROM responses ORDER BY ended_at IS NULL, ended_at, rowid")
        for response_id, owner, is_background, has_events, ended_at, data, journal in rows:
            _check_types(response_id, owner, ended_at, data, journal)
            items: tuple[list[StoredItem], list[StoredItem]] = [], []
            for is_output, item_id, item_data in self._rows_of(response_id, "is_output, id, data", "items"):
                item = StoredItem(item_id, item_data)
                items[is_output].append(shared.setdefault((owner, item), item))
            stored = StoredResponse(
                response_id, owner, tuple(items[0]), tuple(items[1]), data,
                is_background=bool(is_background), is_running=ended_at is None, journal=journal,
            )  # fmt: skip
            if ended_at is not None:
                # A clock that was set back makes no response younger than it can be.
                stored.ended_s = clock_s - max(0.0, now - ended_at)
            if has_events:
                stored.events = EventLog([row[0] for row in self._rows_of(response_id, "data", "events")], is_held=True)
                if ended_at is not None:
                    stored.events.close()
                else:
                    stored.source = self._source_of(response_id)
            yield stored

    def _source_of(self, response_id: str) -> AnswerSource:
        drawn, cuts = (self._rows_of(response_id, *names) for names in (("drawn", "sources"), ("data", "cuts")))
        values = [value for row in drawn for value in json.loads(row[0])]
        return AnswerSource(values, b"".join([row[0] for row in cuts]))

    def _rows_of(self, response_id: str, columns: str, table: str) -> sqlite3.Cursor:
        order = {"items": "is_output, place", "events": "number", "sources": "response", "cuts": "start"}[table]
        # Columns and tables are constants of this module.
        query = f"SELECT {columns} FROM {table} WHERE response = ? ORDER BY {order}"  # noqa: S608
        return self._connection.execute(query, (response_id,))


def _check_types(response_id: Any, owner: Any, ended_at: Any, *blobs: Any) -> None:
    if not (isinstance(response_id, str) and isinstance(owner, str) and isinstance(ended_at, float | None)):
        raise TypeError("a column has another type")
    if not all(isinstance(blob, bytes) for blob in blobs):
        raise TypeError("a column has another type")
