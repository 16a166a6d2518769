"""Kept answers in a database: rows in and out, without threads."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from llmstack_server.options.errors import ServeError
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.database import Schema, open_database, present, transaction
from llmstack_server.state.state_folder import DatabaseReplacedError

SCHEMA: Final = Schema(
    application_id=0x6C6C6D73,  # "llms"
    version=3,
    statements=(
        # `ended_at` is null while an answer is generated. `facts` is JSON.
        """CREATE TABLE answers (
            id TEXT PRIMARY KEY, owner TEXT NOT NULL, ended_at REAL, written_at REAL NOT NULL, facts TEXT NOT NULL,
            data BLOB NOT NULL
        )""",
        """CREATE TABLE pieces (
            answer TEXT NOT NULL, kind INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL,
            PRIMARY KEY (answer, kind, number)
        ) WITHOUT ROWID""",
    ),
)
# Kinds of pieces. The cuts of a source are numbered by the byte that they begin at.
PARTS, CUTS, INPUTS, OUTPUTS = range(4)
# About what an answer takes.
_PROBE, _PROBE_BYTES = "probe", 16 << 10
_DRAWN = "drawn"

Read = TypeVar("Read")


class Written(NamedTuple):
    """What of one answer is in the database: its parts, -1 where all is to be replaced, and bytes of its cuts."""

    num_parts: int = 0
    num_cut_bytes: int = 0


@dataclass(slots=True)
class KeptAnswer:
    """One answer as the database has it.

    Attributes:
        facts: What is known of it, as JSON.
        data: Its request, or the answer as it began, and the whole answer at its end.
        ended_at: When it ended, by the clock of the world; None while it is generated.
        written_at: When it was written last.
        parts: Its parts; of one that is written, those that are new.
        inputs, outputs: Further pieces, written with the row and at the end.
        source: What it is encoded from, while it is generated; None where it has no parts to encode again.
    """

    id: str
    owner: str
    facts: dict[str, Any] = field(default_factory=dict)
    data: bytes = b""
    ended_at: float | None = None
    written_at: float = 0.0
    parts: Sequence[bytes] = ()
    inputs: Sequence[bytes] = ()
    outputs: Sequence[bytes] = ()
    source: AnswerSource | None = None


class Change:
    """A change of the rows of one answer.

    Attributes:
        answer: The answer with its new parts; None where its rows are to be deleted.
        first: The number of the first of these parts, from 0 on.
        cuts: Those of its source that are new, from the byte `cut_start` on.
        written: What is in the database afterwards; None where nothing is.
        num_bytes: About how much is written.
    """

    def __init__(self, answer_id: str, answer: KeptAnswer | None = None, before: Written | None = None) -> None:
        """`before`: What is in the database; None where the answer has no rows yet."""
        self.id = answer_id
        self.answer = answer
        self.is_new = before is None or before.num_parts < 0
        self.first, self.cut_start = Written() if before is None or self.is_new else before
        self.cuts = b""
        self.written: Written | None = None
        self.num_bytes = 0
        if answer is not None:
            if answer.source is not None:
                self.cuts = answer.source.cuts_after(self.cut_start)
            self.written = Written(self.first + len(answer.parts), self.cut_start + len(self.cuts))
            some = (*answer.parts, *(answer.inputs if self.is_new else ()), *answer.outputs)
            self.num_bytes = len(answer.data) + len(self.cuts) + sum(map(len, some))

    def pieces(self) -> Iterator[tuple[str, int, int, bytes]]:
        """The rows of pieces to write."""
        if self.answer is not None:
            inputs = self.answer.inputs if self.is_new else ()
            for kind, first, some in (
                (PARTS, self.first, self.answer.parts), (INPUTS, 0, inputs), (OUTPUTS, 0, self.answer.outputs),
            ):  # fmt: skip
                yield from ((self.id, kind, number, data) for number, data in enumerate(some, first))
            if self.cuts:
                yield self.id, CUTS, self.cut_start, self.cuts


class KeptRows:
    """The rows of one database; used by one thread at a time."""

    def __init__(self, path: Path, secret: bytes = b"", *, is_shared: bool = False) -> None:
        """Opens the database, or makes it. `is_shared`: Whether other processes have it open, too.

        Raises:
            ServeError: It cannot be used; the text is one sentence.
        """
        self._name = f"--state-dir {path.parent}: the file {path.name}"
        self._connection = open_database(path, SCHEMA, is_shared=is_shared, secret=secret)

    def close(self) -> None:
        """Closes the file, and empties its log."""
        self._connection.close()

    def load(self, read: Callable[[KeptAnswer], Read]) -> list[Read]:
        """All answers as `read` understands them: those first that ended first, and unfinished ones last.

        Raises:
            ServeError: A row is not as this program writes it.
        """
        try:
            return [read(answer) for answer in self._load()]
        except (sqlite3.Error, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ServeError(f"{self._name} is damaged ({type(error).__name__}): move it away, or restore it") from None

    def adopt(self, path: Path) -> None:
        """Moves the rows of another database here: that of a process that there is no more.

        Raises:
            ServeError: The file cannot be used.
        """
        KeptRows(path).close()  # checks it, and empties its log
        self._connection.execute("ATTACH DATABASE ? AS other", (str(path),))
        try:
            with transaction(self._connection):
                for table in ("answers", "pieces"):
                    # The names are constants of this module.
                    self._connection.execute(f"INSERT OR IGNORE INTO {table} SELECT * FROM other.{table}")  # noqa: S608
        except sqlite3.Error as error:
            raise ServeError(f"the rows of {path} cannot be moved: {error}") from None
        finally:
            self._connection.execute("DETACH DATABASE other")
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)

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

    def probe(self, now: float) -> None:
        """Writes and removes some bytes; raises as `write`."""
        self.write([Change(_PROBE, KeptAnswer(_PROBE, "", data=bytes(_PROBE_BYTES)))], now)
        self.write([Change(_PROBE)], now)

    def _write(self, change: Change, now: float) -> None:
        execute, answer = self._connection.execute, change.answer
        if answer is None or change.is_new:
            execute("DELETE FROM answers WHERE id = ?", (change.id,))
            execute("DELETE FROM pieces WHERE answer = ?", (change.id,))
        if answer is None:
            return
        drawn = {} if answer.source is None else {_DRAWN: answer.source.values}
        fields = (answer.ended_at, now, json.dumps(answer.facts | drawn))
        if change.is_new:
            execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", (answer.id, answer.owner, *fields, answer.data))
        else:
            execute("UPDATE answers SET ended_at = ?, written_at = ?, facts = ? WHERE id = ?", (*fields, answer.id))
        self._connection.executemany("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?, ?)", change.pieces())
        if answer.ended_at is not None:
            execute("UPDATE answers SET data = ? WHERE id = ?", (answer.data, answer.id))
            execute("DELETE FROM pieces WHERE answer = ? AND kind = ?", (answer.id, CUTS))

    def _load(self) -> Iterator[KeptAnswer]:
        rows = self._connection.execute("SELECT * FROM answers ORDER BY ended_at IS NULL, ended_at, rowid").fetchall()
        for answer_id, owner, ended_at, written_at, facts, data in rows:
            texts = (answer_id, owner, facts)
            if not all(isinstance(text, str) for text in texts) or not isinstance(ended_at, float | None):
                raise TypeError("a column has another type")
            pieces: list[list[bytes]] = [[], [], [], []]
            query = "SELECT kind, data FROM pieces WHERE answer = ? ORDER BY kind, number"
            for kind, piece in self._connection.execute(query, (answer_id,)):
                pieces[kind].append(piece)
            if not all(isinstance(one, bytes) for one in (data, *(one for some in pieces for one in some))):
                raise TypeError("a column has another type")
            known = json.loads(facts)
            values = known.pop(_DRAWN, None)
            source = None if values is None else AnswerSource(values, b"".join(pieces[CUTS]))
            yield KeptAnswer(
                answer_id, owner, known, data, ended_at, written_at,
                pieces[PARTS], pieces[INPUTS], pieces[OUTPUTS], source,
            )  # fmt: skip
